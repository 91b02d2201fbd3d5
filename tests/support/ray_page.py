"""docs/ray_names.md: which public names of Ray's core fastrt has, and why not the others.

python tests/support/ray_page.py: write the page again, by the Ray of ray_env.py.
"""

import importlib
import inspect
import json
import re
import subprocess
from pathlib import Path

from fastrt.ray import refusals, session
from fastrt.tasks.options import CLASSES, FUNCTIONS, OF_RAY, OPTIONS, REFUSED, WITHOUT_MEANING

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/ray_names.md"
HEAD = """# Names of Ray

Every public name of the core of Ray {version}, and whether `fastrt.ray` has it. A refused name of a module raises
an `UnsupportedError`, which is an `AttributeError` or an `ImportError` as well; so does a refused option with another
value than its default. A refused member of a class is not there. An option without effect is taken and changes nothing.
[Coming from Ray](migrating.md) says what differs in the names that are there. `python tests/support/ray_page.py` writes
this page from an installed Ray; a test compares it.
"""
CLASSES_AT = {
    "RuntimeContext": "ray.runtime_context",
    "RayContext": "ray.session",
    "PlacementGroup": "ray.util.placement_group",
    "Queue": "ray.util.queue",
    "Pool": "ray.util.multiprocessing",
    "ActorPool": "ray.util.actor_pool",
    "ActorClass": "ray.actor",
    "ActorMethod": "ray.actor",
    "RemoteFunction": "ray.remote_function",
}
OF_KINDS = {"options of tasks": FUNCTIONS, "options of actors": CLASSES}
NO_EFFECT = "no effect"


def from_ray(python):
    """The names of an installed Ray: version, names by section, bases of the exceptions."""
    command = [python, ROOT / "tests/support/ray_names.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def status_of(section, name):
    """None where the name is there, NO_EFFECT, or the reason of its refusal."""
    if (section, name) == ("ray", "data"):
        return f"{refusals.LIBRARY}; its names can be imported, and raise when they are used"
    if section in OF_KINDS:
        return _status_of_option(OF_KINDS[section], name)
    if section == "arguments of init":
        if name in session.WITHOUT_MEANING:
            return NO_EFFECT
        return None if name in inspect.signature(session.init).parameters else session.REASONS[name]
    if not section.startswith("ray"):
        cls = getattr(importlib.import_module(f"fastrt.{CLASSES_AT.get(section, 'ray')}"), section)
        if hasattr(cls, name) or name in {**cls.__annotations__, **getattr(cls, "__dataclass_fields__", {})}:
            return None
        return refusals.reason_of(section, name) or refusals.REFUSED["id"][name]
    parent, _, last = section.rpartition(".")
    if refusals.reason_of(parent, last) is not None:
        return refusals.reason_of(parent, last)
    try:
        getattr(importlib.import_module(f"fastrt.{section}"), name)
    except refusals.RefusedName:
        return refusals.reason_of(section, name)
    return None


def _status_of_option(kind, name):
    if name in OPTIONS[kind] or name in ("accelerator_type", "placement_group") or name.startswith("placement_group_"):
        return None
    assert name in OF_RAY[kind], f"{name!r} is an option of Ray's {kind}; fastrt neither takes nor refuses it"
    return NO_EFFECT if name in WITHOUT_MEANING else REFUSED[name]


def render(version, names):
    """The page's text."""
    parts = [HEAD.format(version=version)]
    for section, found in names.items():
        by_status = {}
        for name in found:
            by_status.setdefault(status_of(section, name), []).append(f"`{name}`")
        parts.append(f"## {section}\n")
        rows = []
        if None in by_status:
            rows.append(f"- There: {', '.join(by_status.pop(None))}")
        if NO_EFFECT in by_status:
            rows.append(f"- No effect: {', '.join(by_status.pop(NO_EFFECT))}")
        rows += [f"- Refused: {', '.join(which)}: {reason}" for reason, which in sorted(by_status.items())]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def read():
    """The version and the names that the page lists."""
    text = PAGE.read_text()
    version = re.search(r"core of Ray ([\d.]+)", text)[1].rstrip(".")
    names = {}
    for part in text.split("\n## ")[1:]:
        section, _, body = part.partition("\n")
        listed = [row.split(": ")[1] for row in body.splitlines() if row.startswith("- ")]
        names[section] = sorted(name for row in listed for name in re.findall(r"`([^`]+)`", row))
    return version, names


if __name__ == "__main__":
    from ray_env import python_with_ray

    about = from_ray(python_with_ray())
    PAGE.write_text(render(about["version"], about["names"]))
