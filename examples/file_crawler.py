"""A crawler of actors over local files: pages name other pages, and every page is read once.

Run: python examples/file_crawler.py [--engine fastrt|local|ray|ray-itself] [--size N]

One actor, the frontier, knows the pages that have been seen; readers, actors too, read the pages assigned to them,
report their links, and keep an index of words. The assignment of pages to readers depends on timing; the result
does not, and is compared with a walk over the same files.
"""

import re
import tempfile
from collections import deque
from pathlib import Path

from engines import run

READERS = 3
LINK = re.compile(r"\[\[(\w+)\]\]")
WORD = re.compile(r"\b[a-z]{3,}\b")


def write_pages(folder, count):
    """Pages that link to some others; no page links to a few of them."""
    for number in range(count):
        links = {(number * 7 + 3) % count, (number * number + 1) % count, number // 2, number + 1}
        text = " ".join(f"[[page{link}]]" for link in sorted(links) if link < count and link % 11 != 5)
        topic = ("river", "stone", "cloud", "grass")[number % 4]
        (folder / f"page{number}.txt").write_text(f"about {topic} and number{number} {topic}\n{text}\n" * 20)


def links_and_words(path):
    text = Path(path).read_text()
    return LINK.findall(text), WORD.findall(LINK.sub("", text))


class Frontier:
    """The pages that have been seen, and those still to be read."""

    def __init__(self, first):
        self.seen = {first}
        self.waiting = deque([first])

    def found(self, names):
        for name in names:
            if name not in self.seen:
                self.seen.add(name)
                self.waiting.append(name)

    def take(self, most):
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]

    def all_seen(self):
        return sorted(self.seen)


class Reader:
    """Reads pages and keeps count of words."""

    def __init__(self, folder, frontier):
        self.folder = folder
        self.frontier = frontier
        self.words = {}

    def read(self, name):
        """Read a page, report its links to the frontier, and only then report that this page is done."""
        links, words = links_and_words(f"{self.folder}/{name}.txt")
        for word in words:
            self.words[word] = self.words.get(word, 0) + 1
        return self.frontier.found.remote(links)

    def counts(self):
        return self.words


def crawl(ray, folder):
    frontier = ray.remote(Frontier).remote("page0")
    readers = [ray.remote(Reader).remote(str(folder), frontier) for _ in range(READERS)]
    idle, busy = list(readers), {}
    while True:
        for name in ray.get(frontier.take.remote(len(idle))) if idle else []:
            reader = idle.pop()
            busy[reader.read.remote(name)] = reader
        if not busy:
            break
        done, _ = ray.wait(list(busy), num_returns=1)
        for ref in done:
            ray.get(ray.get(ref))  # the reader has read, and the frontier has its report
            idle.append(busy.pop(ref))
    total = {}
    for counts in ray.get([reader.counts.remote() for reader in readers]):
        for word, count in counts.items():
            total[word] = total.get(word, 0) + count
    return ray.get(frontier.all_seen.remote()), total


def walk(folder):
    """The same by one loop."""
    seen, waiting, total = {"page0"}, ["page0"], {}
    while waiting:
        links, words = links_and_words(folder / f"{waiting.pop()}.txt")
        for word in words:
            total[word] = total.get(word, 0) + 1
        new = set(links) - seen
        seen |= new
        waiting += new
    return sorted(seen), total


def main(ray, size):
    """The pages that were found, and how often each word occurs.

    Args:
        ray: the module: fastrt or Ray.
        size: number of pages.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pages(folder, size)
        seen, total = crawl(ray, folder)
        return [seen, sorted(total.items())]


def check(result, size):
    """Compare with a walk by one loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pages(folder, size)
        seen, total = walk(folder)
        assert result == [seen, sorted(total.items())]


if __name__ == "__main__":
    run(main, check, size=400)
