"""Checks the pinned packages against the package index: `python requirements/audit.py`.

Asks three questions about each pin: is it yanked, does the index know a vulnerability, do the hashes match.
Exit status 1 on any finding that is not in ACCEPTED. If the index does not answer, or has no vulnerability
data for a version, that is no failure: the last line says how many pins each question was answered for.
"""

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from requirements.relock import FILES, path_of, read_pins, versions

ACCEPTED: Mapping[str, str] = {}
"""Vulnerability id → why it does not concern us."""

SECONDS = 20.0
MAX_BYTES = 64 * 2**20
CONNECTIONS = 8

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    hashes: frozenset[str]


@dataclass(slots=True)
class Audited:
    """None means that the index did not say."""

    pin: Pin
    complaints: list[str] = field(default_factory=list)
    knows_files: bool = False
    knows_vulnerabilities: bool = False


def main() -> int:
    pins = pinned()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = list(pool.map(ask, pins))
    complaints = [
        f"{each.pin.name} {each.pin.version}: {text}" for each in answers for text in each.complaints
    ]
    sys.stdout.writelines(f"{complaint}\n" for complaint in complaints)
    files = sum(each.knows_files for each in answers)
    vulnerabilities = sum(each.knows_vulnerabilities for each in answers)
    sys.stdout.write(
        f"audit: {len(pins)} pins; the index answered for the files of {files} and the vulnerabilities of"
        f" {vulnerabilities}; {len(complaints)} complaints\n"
    )
    return 1 if complaints else 0


def pinned() -> list[Pin]:
    """Return each version of each package once, with all hashes in any file."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for file in FILES:
        for package, lines in read_pins(path_of(file.name)).items():
            for version in {pin.split(" ")[0].partition("==")[2] for pin in versions({package: lines})}:
                hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", _of_version(lines, version)))
                key = (package, version)
                found[key] = found.get(key, frozenset()) | hashes
    return [Pin(name, version, hashes) for (name, version), hashes in sorted(found.items())]


def _of_version(lines: str, version: str) -> str:
    """Return the part of a package's lines about this version."""
    parts = re.split(r"^(?=[\w.-]+==)", lines, flags=re.M)
    return "".join(part for part in parts if re.match(rf"[\w.-]+=={re.escape(version)}(?![\w.+])", part))


def ask(pin: Pin, index: str | None = None) -> Audited:
    """Query the index; `index` is the part before /simple and /pypi, by default pip's."""
    index = default_index() if index is None else index
    answer = Audited(pin)
    listing = fetch(f"{index}/simple/{pin.name}/")
    if listing is not None:
        answer.knows_files = True
        answer.complaints += judge_files(pin, listing)
    known = fetch(f"{index}/pypi/{pin.name}/{pin.version}/json") or fetch(f"{index}/pypi/{pin.name}/json")
    if known is not None and known.get("info", {}).get("version") == pin.version:
        answer.knows_vulnerabilities = True
        answer.complaints += judge_vulnerabilities(known.get("vulnerabilities") or [])
    return answer


def judge_files(pin: Pin, listing: Mapping[str, Any]) -> list[str]:
    """Check by PEP 691 that every pinned hash belongs to a file that exists and is not yanked."""
    by_hash = {file.get("hashes", {}).get("sha256"): file for file in listing.get("files", [])}
    unknown = pin.hashes - set(by_hash)
    yanked = [
        by_hash[hash_]["yanked"] for hash_ in sorted(pin.hashes - unknown) if by_hash[hash_].get("yanked")
    ]
    complaints = [f"the index has no file with the hash {hash_}" for hash_ in sorted(unknown)]
    if yanked:
        reason = next((text for text in yanked if isinstance(text, str)), "no reason given")
        complaints.append(f"was taken back: {reason}")
    return complaints


def judge_vulnerabilities(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{each.get('id')}: {each.get('summary') or str(each.get('details', ''))[:200]}"
        f" (fixed in {', '.join(each.get('fixed_in') or []) or 'no version'})"
        for each in found
        if not each.get("withdrawn")
        and not {str(each.get("id")), *map(str, each.get("aliases") or [])} & ACCEPTED.keys()
    ]


def default_index() -> str:
    from pip._internal.models.index import PyPI

    return str(PyPI.url).rstrip("/")


def fetch(url: str) -> Any:
    """Fetch JSON; None without an answer."""
    request = urllib.request.Request(url, headers={"Accept": f"{SIMPLE_JSON}, application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.loads(response.read(MAX_BYTES))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
