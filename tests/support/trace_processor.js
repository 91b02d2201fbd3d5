// Runs the trace processor of Perfetto's web page in Node: reads and writes its byte protocol at stdin and stdout.
// The page runs it in a web worker, whose names are given here. Argument: the folder of engine_bundle.js.
const fs = require("fs"), path = require("path"), vm = require("vm"), node = process, folder = node.argv[2];
const read = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));
const bytes = (url) => { const b = read(url); return b.buffer.slice(b.byteOffset, b.byteOffset + b.length); };
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = { href: `file://${folder}/engine_bundle.js`, protocol: "file:", host: "" };
globalThis.XMLHttpRequest = class {
  open(verb, url) { this.url = url; }
  send() { this.status = 200; this.response = bytes(this.url); this.onload?.(); }
};
console.log = console.warn = console.error = (...words) => node.stderr.write(words.join(" ").slice(0, 500) + "\n");
for (const name of ["uncaughtException", "unhandledRejection"])
  node.on(name, (error) => { node.stderr.write(String(error?.message ?? error).slice(0, 500) + "\n"); node.exit(3); });
Object.defineProperty(globalThis, "process", { value: undefined, configurable: true, writable: true });
vm.runInThisContext(read("engine_bundle.js").toString());
const port = { postMessage: (message) => node.stdout.write(Buffer.from(message)), onmessage: null };
setImmediate(() => {  // the module is compiled by then: its loader is synchronous
  globalThis.onmessage({ data: port });
  node.stdin.on("data", (data) => port.onmessage({ data: new Uint8Array(data) }));
  node.stdin.on("end", () => node.exit(0));
});
