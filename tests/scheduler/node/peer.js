// A peer of the scheduler that knows nothing of fastrt but its protos: `node peer.js worker|client SCHEDULER TOKEN PROTOS`.
//
// Both roles serve an object store of their own. The worker registers the function `shout` and runs it; the client
// pushes an object, submits a call that takes it, fetches the result into its own store, and prints what it got.
"use strict";
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const [role, schedulerAddress, token, protos] = process.argv.slice(2);
const files = ["scheduler.proto", "objstore.proto", "worker.proto"];
const options = { includeDirs: [protos], keepCase: true, longs: String, defaults: true };
const wire = grpc.loadPackageDefinition(loader.loadSync(files.map((name) => path.join(protos, name)), options));
const root = new protobuf.Root();
root.resolvePath = (_, name) => path.join(protos, path.basename(name));
const Obj = root.loadSync("types.proto", { keepCase: true }).lookupType("Obj");

const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${token}`);
const insecure = grpc.credentials.createInsecure();
const scheduler = new wire.Scheduler(schedulerAddress, insecure);

// A unary call as a promise.
function call(method, request) {
  return new Promise((resolve, reject) =>
    scheduler[method](request, metadata, { deadline: Date.now() + 20000 }, (error, reply) =>
      error ? reject(error) : resolve(reply)
    )
  );
}

const encode = (value) => Buffer.from(Obj.encode(Obj.fromObject(value)).finish());
const text = (bytes) => Obj.decode(bytes).string_data.data.toString();

// The object store: bytes by reference, and those who wait for some.
const objects = new Map();
const waiting = [];
let store = null;

function have(objref, bytes) {
  objects.set(objref, bytes);
  for (const each of waiting.filter((one) => one.objref === objref)) each.resolve(bytes);
}

const object = (objref) =>
  objects.has(objref)
    ? Promise.resolve(objects.get(objref))
    : new Promise((resolve) => waiting.push({ objref, resolve }));

async function put(objref, bytes) {
  have(objref, bytes);
  await call("ObjReady", { objref, objstoreid: store });
}

const failed = (callback) => (error) =>
  callback({ code: error.code || grpc.status.INTERNAL, details: error.details || String(error) });

const objStore = {
  DeliverObj({ request }, callback) {
    const bytes = objects.get(request.objref);
    if (bytes === undefined) return callback({ code: grpc.status.NOT_FOUND, details: `no object ${request.objref}` });
    const target = new wire.ObjStore(request.objstore_address, insecure);
    const stream = target.StreamObj(metadata, (error) => {
      target.close();
      error ? failed(callback)(error) : callback(null, {});
    });
    for (let at = 0; at < bytes.length; at += 5)
      stream.write({ objref: request.objref, totalsize: bytes.length, data: bytes.subarray(at, at + 5) });
    stream.end();
  },
  StreamObj(stream, callback) {
    const parts = [];
    let first = null;
    stream.on("data", (chunk) => {
      first = first || chunk;
      parts.push(chunk.data);
    });
    stream.on("end", () => {
      const bytes = Buffer.concat(parts);
      if (first === null || bytes.length !== Number(first.totalsize))
        return callback({ code: grpc.status.INVALID_ARGUMENT, details: "the sizes disagree" });
      put(first.objref, bytes).then(() => callback(null, {}), failed(callback));
    });
  },
  NotifyAlias({ request }, callback) {
    have(request.alias_objref, objects.get(request.canonical_objref));
    callback(null, {});
  },
  DeallocateObject({ request }, callback) {
    objects.delete(request.canonical_objref);
    console.log(JSON.stringify({ deallocated: request.canonical_objref }));
    callback(null, {});
  },
  ObjStoreInfo(_, callback) {
    callback(null, { objref: [...objects.keys()], obj: [] });
  },
};

// The worker: `shout` joins its arguments, by value or by reference, in capitals.
let worker = null;

async function run({ arg, result }) {
  const words = [];
  for (const value of arg) words.push(value.obj ? value.obj.string_data.data.toString() : text(await object(value.ref)));
  await call("DecrementRefCount", { objref: [...arg.filter((one) => !one.obj).map((one) => one.ref), ...result] });
  await put(result[0], encode({ string_data: { data: Buffer.from(words.join(" ").toUpperCase()) } }));
  await call("WorkerReady", { workerid: worker });
}

const workerService = {
  InvokeCall({ request }, callback) {
    callback(null, {});
    run(request.call).catch((error) => {
      console.error(error);
      process.exit(1);
    });
  },
};

async function serve() {
  const server = new grpc.Server();
  server.addService(wire.ObjStore.service, objStore);
  server.addService(wire.WorkerService.service, workerService);
  const port = await new Promise((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound)
    )
  );
  const address = `127.0.0.1:${port}`;
  store = (await call("RegisterObjStore", { objstore_address: address })).objstoreid;
  worker = (await call("RegisterWorker", { worker_address: address, objstore_address: address })).workerid;
}

async function client() {
  const pushed = (await call("PushObj", { workerid: worker })).objref;
  await put(pushed, encode({ string_data: { data: Buffer.from("from afar") } }));
  await call("IncrementRefCount", { objref: [pushed, pushed] }); // one is for the message
  const missing = await call("RemoteCall", { call: { name: "whisper" } }).catch((error) => error);
  const arg = [{ obj: { string_data: { data: Buffer.from("hello") } } }, { ref: pushed }];
  const [result] = (await call("RemoteCall", { call: { name: "shout", arg } })).result;
  await call("RequestObj", { workerid: worker, objref: result });
  const answer = text(await object(result));
  await call("DecrementRefCount", { objref: [pushed] });
  await call("IncrementCount", { objref: result });
  await call("DecrementCount", { objref: result });
  console.log(JSON.stringify({ answer, pushed, result, refused: [missing.code, missing.details] }));
}

async function main() {
  await serve();
  if (role === "worker") await call("RegisterFunction", { workerid: worker, fnname: "shout", num_return_vals: 1 });
  else await client();
  console.log(JSON.stringify({ ready: role, worker, store }));
  process.stdin.resume();
  process.stdin.on("end", () => process.exit(0)); // the test lets go
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
