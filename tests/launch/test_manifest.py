"""`fastrt manifest`: its objects, as Kubernetes and `fastrt run` read them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from fastrt.errors import ConfigError
from fastrt.launch.detect import detect
from fastrt.launch.manifest import ManifestOptions, name_of, objects, to_yaml
from support.cluster import FASTRT

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
HOSTILE = [
    *(
        "a b",
        "",
        "'",
        '"',
        "\\",
        "- x: y",
        "yes",
        "0x1",
        "null",
        "#",
        "$(HOME)",
        "$$",
        "a\nb: c",
        "\t",
        "---",
        "é",
        "\U0001f40d",
    ),
    *("{a: b}", "%x", "@", "!!python/object", "&a", "*a", "|", "> ", "${HOME}", "`id`", "; rm -r /", "--image", "x: #"),
]


def made(words=("app.py",), **options):
    given = {"name": "train-1", "nodes": 2, "image": "registry/img:1", "token": "the-token", **options}
    return objects(ManifestOptions(words=list(words), **given))


def pod_of(found):
    return found[2]["spec"]["template"]["spec"]


def expanded(word, env):
    """Kubernetes' expansion of commands: `third_party/forked/golang/expansion/expand.go`."""

    def replace(match):
        text = match[0]
        return "$" if text == "$$" else env.get(text[2:-1], text) if text.startswith("$(") else text

    return re.sub(r"\$\$|\$\([^)]*\)|\$", replace, word)


def test_pods_of_the_job_are_the_ranks_that_fastrt_run_finds():
    found = made(nodes=3)
    (container,) = pod_of(found)["containers"]
    env = {one["name"]: one.get("value", "") for one in container["env"]}
    job, service = found[2]["metadata"]["name"], found[1]["metadata"]["name"]
    for index in range(3):
        place = detect({**env, "JOB_COMPLETION_INDEX": str(index)}, f"{job}-{index}")
        assert (place.rank, place.size, place.head) == (index, 3, f"{job}-0.{service}")
        assert place.hosts == tuple(f"{job}-{k}.{pod_of(found)['subdomain']}" for k in range(3))
    assert found[1]["spec"]["selector"].items() <= found[2]["spec"]["template"]["metadata"]["labels"].items()
    assert found[0]["stringData"] == {"token": "the-token"}
    assert "the-token" not in json.dumps(found[1:])


@pytest.mark.parametrize(
    ("memory", "shm", "size"), [("8Gi", "", "4096Mi"), ("8Gi", "1Gi", "1Gi"), ("", "", None), ("1.5G", "", None)]
)
def test_shared_memory_is_memory_of_half_the_pods(memory, shm, size):
    (volume,) = pod_of(made(memory=memory, shm=shm))["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"].get("sizeLimit") == size


def test_hostile_arguments_reach_the_program_as_they_are():
    yaml = pytest.importorskip("yaml")
    found = made(HOSTILE, gpus=1, gpu_resource="y")
    assert list(yaml.safe_load_all(to_yaml(found))) == found
    command = pod_of(found)["containers"][0]["command"]
    assert [expanded(word, {"HOME": "/root"}) for word in command[4:]] == HOSTILE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a\nb"}, "--name"),
        ({"name": "-a"}, "--name"),
        ({"name": "a" * 51}, "--name"),
        ({"image": "a b"}, "--image"),
        ({"image": ""}, "--image"),
        ({"memory": "8 GB"}, "--memory"),
        ({"namespace": "A/b"}, "--namespace"),
        ({"gpu_resource": "x\n"}, "--gpu-resource"),
        ({"nodes": 0}, "--nodes"),
        ({"words": ["a\0b"]}, "cannot be written"),
    ],
)
def test_option_that_cannot_be_used_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        made(**options)


@pytest.mark.parametrize(
    "program", ["train.py", "/a b/Ünder_score.PY", "-x", "9.py", "", "a" * 200, "pkg.mod", "$(x)\n.py"]
)
def test_every_program_has_a_valid_name(program):
    name = name_of(program, "abc123")
    assert made(name=name)[2]["metadata"]["name"] == name
    assert name.endswith("-abc123")


def test_command_prints_the_objects_with_a_new_token_each_time(runtime_dir):
    words = ["--nodes", "2", "--image", "img", "--json", "--", "--num-workers", "3", "My App.py", "--image", "x"]
    lists = []
    for _ in range(2):
        ended = subprocess.run([*FASTRT, "manifest", *words], capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, ended.stderr
        lists.append(json.loads(ended.stdout)["items"])
    command = pod_of(lists[0])["containers"][0]["command"]
    assert command == ["fastrt", "run", "--grace", "30", "--num-workers", "3", "My App.py", "--image", "x"]
    assert lists[0][2]["metadata"]["name"].startswith("my-app-")
    assert lists[0][0]["stringData"] != lists[1][0]["stringData"]


def test_commands_of_the_page_print_a_job_of_their_nodes_and_image():
    lines = re.findall(r"^\$ (fastrt manifest [^|#\n]*)\|", (ROOT / "docs" / "launching.md").read_text(), re.M)
    assert len(lines) == 2
    for line in lines:
        _, *words = line.split()
        ended = subprocess.run([*FASTRT, words[0], "--json", *words[1:]], capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, ended.stderr
        job = json.loads(ended.stdout)["items"][2]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert job["spec"]["completions"] == 4
        assert container["image"] == words[words.index("--image") + 1]
        assert container["command"][-1] == "app.py"


@pytest.mark.long
def test_objects_are_valid_by_the_published_schemas():
    validate = pytest.importorskip("kubernetes_validate")
    for options in ({}, {"namespace": "team", "cpu": "4", "memory": "8Gi", "gpus": 2, "pull_secret": "registry"}):
        for version in ("1.31", validate.latest_version()):
            for one in made(HOSTILE, **options):
                validate.validate(one, version, strict=True)
    wrong = made()[2]
    wrong["spec"]["template"]["spec"]["subdomian"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.31", strict=True)


def test_no_recipe_switches_encryption_off():
    """A recipe is what a reader copies: code of the pages and the README, examples, the image, manifests."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(page): "".join(BLOCK.findall(page.read_text())) for page in pages}
    texts |= {str(path): path.read_text() for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh")}
    texts |= {"Dockerfile": (ROOT / "Dockerfile").read_text(), "manifest": json.dumps(made())}
    assert "fastrt run" in texts[str(ROOT / "docs" / "launching.md")]
    assert [name for name, text in texts.items() if "insecure" in text] == []
