"""Tests of docker-compose.yml and the Dockerfile, compared with the native deployment (no containers) and the threat model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.deployment import commands
from fedsim.deployment.folders import Layout
from fedsim.deployment.mounts import Mount, list_mounts

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(Path("/federation"))
CLIENTS = 3
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
FOLDER = re.compile(r"^\$\{FEDERATION:-\./federation\}/(\S+?):/federation/(\S+?)(:ro)?$")
SECURE = [*(name for name in SERVICES if not name.startswith("insecure-"))]
WITHOUT_NATIVE = {
    "attacker": {Mount("attacks", True), Mount("attacks/federation/recording")},
    "page": set[Mount](),
    "scorer": {
        Mount("scores", True),
        Mount("attacks/federation/reconstructions"),
        *(Mount(f"clients/{number}/{name}") for number in range(CLIENTS) for name in ("data", "truth")),
    },
}
"""Mounts of the services that the native deployment does not start."""


def expected(name: str) -> list[str]:
    """Return the command of a service, from the functions that the native deployment uses if it starts this party."""
    secure, party = not name.startswith("insecure-"), name.removeprefix("insecure-")
    link = LAYOUT.make_link(f"{'' if secure else 'insecure-'}superlink:8000", secure=secure)
    if party == "superlink":
        identity = LAYOUT.find_identity() if secure else None
        network = COMPOSE["networks"]["server" if secure else "insecure-server"]["ipam"]["config"][0]["subnet"]
        database = str(LAYOUT.database)
        return commands.make_superlink_command(
            host="0.0.0.0", port=8000, database=database, identity=identity, control_from=[network]
        )
    if party == "enrol":
        return ["fedsim", "enrol", str(LAYOUT.keys), "--superlink", link.address, *link.list_options()]
    if party == "server":
        return commands.make_server_command(link, secret=str(LAYOUT.certificates.secret) if secure else None)
    if party.startswith("client-"):
        number = int(party.removeprefix("client-"))
        key = str(LAYOUT.make_key_path(number)) if secure else None
        return commands.make_client_command(link, key=key, port=9094, config=LAYOUT.make_client_config(number, CLIENTS))
    if party == "runner":
        return commands.make_runner_command(
            link, experiment=str(LAYOUT.experiment), out=str(LAYOUT.run), public=str(LAYOUT.public)
        )
    if party == "scorer":
        return commands.make_scorer_command(run=str(LAYOUT.scored), truth=LAYOUT.list_truths(CLIENTS))
    if party in ("page", "page-gpu"):
        return ["python", "-m", "fedsim.deployment.forward", "8600", f"{party.replace('page', 'attacker')}:8600"]
    return ["attacker", "serve", str(LAYOUT.attacked.parent), "--host", "0.0.0.0", "--port", "8600"]


def mounted(name: str) -> set[Mount]:
    """Return what a service mounts. A folder has the same path inside and outside, so that all parties name files alike."""
    found = set()
    for volume in SERVICES[name].get("volumes", ()):
        match = FOLDER.match(volume)
        assert match is not None, volume
        assert match[1] == match[2], volume
        found.add(Mount(match[1], match[3] is None))
    return found


def below(name: str) -> set[str]:
    """Return the topmost folders that a service sees."""
    return {mount.path.split("/")[0] for mount in mounted(name)}


def test_all_parties_are_there() -> None:
    parties = {"superlink", "server", "runner", *(f"client-{number}" for number in range(CLIENTS))}
    others = {"enrol", "attacker", "attacker-gpu", "page", "page-gpu", "scorer"}
    assert set(SERVICES) == parties | {f"insecure-{party}" for party in parties} | others


@pytest.mark.parametrize("name", SERVICES)
def test_every_command_is_the_one_that_the_native_run_executes(name: str) -> None:
    assert SERVICES[name]["command"] == expected(name)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_mounts_what_its_native_process_sees(name: str) -> None:
    party = name.removeprefix("insecure-").removesuffix("-gpu")
    if party not in WITHOUT_NATIVE:
        assert mounted(name) == set(list_mounts(party, secure=not name.startswith("insecure-")))
    else:
        assert mounted(name) == WITHOUT_NATIVE[party]


@pytest.mark.parametrize("name", SERVICES)
def test_no_party_is_root_or_may_do_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "${FEDLEAK_USER:-1000:1000}"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"privileged", "cap_add", "pid", "ipc", "devices", "env_file", "environment"} & service.keys() == set()
    assert service["image"] == "fedleak"


def test_the_attacker_can_read_the_recording_and_reach_no_data_truth_or_client() -> None:
    for name in ("attacker", "attacker-gpu"):
        assert below(name) == {"attacks"}
        assert Mount("attacks/federation/recording", writable=False) in mounted(name)
        assert networks(name) == {"page"}
        assert "ports" not in SERVICES[name]
    assert {name for name in SERVICES if "page" in networks(name)} == {"attacker", "attacker-gpu", "page", "page-gpu"}


def networks(name: str) -> set[str]:
    return set(SERVICES[name].get("networks", []))


def test_only_clients_and_the_scorer_see_truth_and_the_scorer_has_no_network() -> None:
    holders = {name for name in SERVICES for mount in mounted(name) if mount.path.endswith(("/truth", "/data"))}
    assert holders == {"scorer", *(name for name in SERVICES if "client-" in name)}
    assert SERVICES["scorer"]["network_mode"] == "none"
    assert not any(mount.writable for mount in mounted("scorer") if not mount.path.startswith("scores"))
    assert {name for name in SERVICES if "scores" in below(name)} == {"scorer"}


@pytest.mark.parametrize("number", range(CLIENTS))
def test_a_client_has_its_own_folders_and_nobody_elses(number: int) -> None:
    for name in (f"client-{number}", f"insecure-client-{number}"):
        private = {mount.path for mount in mounted(name)} - {"public", "trust"}
        assert all(path.startswith(f"clients/{number}/") for path in private)
        assert Mount(f"clients/{number}/data", writable=False) in mounted(name)


def test_the_server_sees_no_data_and_nobody_sees_the_certificate_authoritys_key() -> None:
    assert {"clients", "superlink", "scores"} & below("server") == set()
    assert {name for name in SERVICES if "superlink" in below(name)} == {"superlink", "insecure-superlink"}
    assert {name for name in SERVICES if "secret" in below(name)} == {"superlink", "server"}
    assert not any("authority" in below(name) for name in SERVICES)


def test_clients_reach_the_superlink_only_and_only_its_port_and_the_pages_are_published() -> None:
    assert networks("superlink") == {"clients", "server", "outside"}
    for number in range(CLIENTS):
        assert networks(f"client-{number}") == {"clients"}
    for name in ("server", "runner", "enrol"):
        assert networks(name) == {"server"}
    assert all(COMPOSE["networks"][name].get("internal") for name in COMPOSE["networks"] if name not in ("outside", "front"))
    published = {name: SERVICES[name]["ports"] for name in SERVICES if "ports" in SERVICES[name]}
    assert set(published) == {"superlink", "page", "page-gpu"}
    assert {name for name in SERVICES if "outside" in networks(name)} == {"superlink"}
    assert {name for name in SERVICES if "front" in networks(name)} == {"page", "page-gpu"}
    assert published["page"] == published["page-gpu"] == ["127.0.0.1:8600:8600"]
    assert published["superlink"] == ["${SUPERLINK:-127.0.0.1:8000}:8000"]


def test_tls_and_keys_are_on_unless_the_profile_insecure_is_chosen() -> None:
    profiles = {"scorer": ["score"], "attacker-gpu": ["gpu"], "page-gpu": ["gpu"]}
    for name in SECURE:
        assert "--insecure" not in SERVICES[name]["command"], name
        assert SERVICES[name].get("profiles", []) == profiles.get(name, [])
    for name in set(SERVICES) - set(SECURE):
        assert SERVICES[name]["profiles"] == ["insecure"]
        assert all(network.startswith("insecure-") for network in networks(name))
    (reserved,) = SERVICES["attacker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["capabilities"] == ["gpu"]


def test_a_party_that_dies_is_restarted() -> None:
    lasting = {name for name, service in SERVICES.items() if service.get("restart") == "on-failure"}
    assert lasting == {name for name in SERVICES if re.fullmatch(r"(insecure-)?(superlink|server|client-\d)", name)}


def test_each_service_starts_when_those_it_needs_are_healthy() -> None:
    for number in range(CLIENTS):
        needed = SERVICES[f"client-{number}"]["depends_on"]
        assert needed["superlink"]["condition"] == "service_healthy"
        assert needed["enrol"]["condition"] == "service_completed_successfully"
        assert SERVICES["runner"]["depends_on"][f"client-{number}"]["condition"] == "service_healthy"
    for name in ("superlink", "client-0", "attacker"):
        _, *check = SERVICES[name]["healthcheck"]["test"]
        assert check[:3] == ["python", "-m", "fedsim.deployment.health"]
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert set(service.get("networks", [])) <= set(COMPOSE["networks"])


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", (ROOT / "deploy/Dockerfile").read_text()).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line and not line.startswith(("#", " "))]


def test_the_image_is_slim_pinned_and_does_not_run_as_root() -> None:
    found = instructions()
    (base,) = (words.removeprefix("PYTHON=") for name, words in found if name == "ARG" and words.startswith("PYTHON="))
    assert re.fullmatch("3.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert [words for name, words in found if name == "FROM"] == [f"python:${{PYTHON:-{base}}}"]
    assert [words for name, words in found if name == "USER"] == ["10001:10001"]
    assert [name for name, _ in found].index("USER") > max(i for i, (name, _) in enumerate(found) if name == "RUN")
    installs = [words for _, words in found if "pip install" in words]
    assert all("--no-deps" in words for words in installs), "nothing is installed that is not listed"
    assert sum("--require-hashes" in words for words in installs) == len(installs) - 2, "PyTorch by version, and this package"
    assert "--no-build-isolation" in installs[-1], "or what builds it would be fetched unseen"
    assert any(name == "HEALTHCHECK" for name, _ in found)
    assert "ARG TORCH=cpu" in (ROOT / "deploy/Dockerfile").read_text()
    for _, words in (one for one in found if one[0] == "COPY"):
        *sources, _ = shlex.split(words)
        assert all((ROOT / source).exists() for source in sources)
        assert {f"!{source}" for source in sources} <= {*(ROOT / ".dockerignore").read_text().splitlines()}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {("COPY", f"{name.rstrip('*')} {name.rstrip('*')}") for name in packages} <= set(found)
    (torch,) = (words for _, words in found if "download.pytorch.org" in words)
    assert "--no-deps" in torch  # this index lacks pinned versions of its dependencies
    environment = " ".join(words for name, words in found if name == "ENV")
    assert all(f"{key}={value}" in environment for key, value in commands.FLOWER_ENVIRONMENT.items())


@pytest.mark.parametrize(
    ("python", "unpinned", "good"),
    [
        (f"3.11-slim-bookworm@sha256:{'a' * 64}", "no", True),
        ("3.11-slim-bookworm", "yes", True),
        ("3.11-slim-bookworm", "no", False),
        ("", "no", True),  # then the pinned one
        (f"3.11@sha256:{'a' * 63}", "no", False),
        (f"3.11@sha256:{'a' * 64}b", "", False),
    ],
)
def test_a_base_image_without_its_digest_is_refused(python: str, unpinned: str, good: bool) -> None:
    (check,) = (words for name, words in instructions() if name == "RUN" and "@sha256" in words)
    done = subprocess.run(
        ["sh", "-c", check], env={"PYTHON": python, "UNPINNED": unpinned, "PATH": os.environ["PATH"]}, check=False
    )
    assert (done.returncode == 0) == good


@pytest.mark.parametrize("name", SERVICES)
def test_memory_and_processes_are_limited(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"] == service["memswap_limit"] == "${MEMORY:-4g}"
    assert 0 < service["pids_limit"] <= 512
    assert "--no-job-limits" not in service["command"], "jobs have the service's own limits"


def test_the_attacker_has_no_internet_and_its_page_has_no_files() -> None:
    for name in ("attacker", "attacker-gpu"):
        assert all(COMPOSE["networks"][network] == {"internal": True} for network in networks(name))
        assert SERVICES[name]["dns"] == ["127.0.0.1"]
    for name in ("page", "page-gpu"):
        assert mounted(name) == set()
        assert set(SERVICES[name]["depends_on"]) == {name.replace("page", "attacker")}


def test_the_superlink_takes_commands_from_a_network_without_clients() -> None:
    for prefix in ("", "insecure-"):
        words = SERVICES[f"{prefix}superlink"]["command"]
        subnet = COMPOSE["networks"][f"{prefix}server"]["ipam"]["config"][0]["subnet"]
        assert words[words.index("--control-from") + 1] == subnet
        assert {name for name in SERVICES if f"{prefix}server" in networks(name)} == {
            f"{prefix}{party}" for party in ("superlink", "server", "runner")
        } | ({"enrol"} if not prefix else set())


def test_the_constraints_pin_all_that_the_package_asks_for() -> None:
    lines = [line for line in (ROOT / "deploy/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+_-]*", line) for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[\[<>=]", one)[0].lower() for one in asked} <= pinned
    assert not any(name.startswith(("cuda-", "nvidia-")) for name in pinned)  # they depend on the build of PyTorch


def test_all_that_is_installed_beside_pytorch_is_known_by_its_hashes() -> None:
    pinned = {line.lower().replace("_", "-") for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()}
    blocks = [
        block.replace("\\\n", " ").split()
        for name in ("requirements.txt", "requirements-cuda.txt")
        for block in re.findall(r"(?m)^[A-Za-z0-9].*(?:\n .*)*", (ROOT / "deploy" / name).read_text())
    ]
    assert all(hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes) for _, *hashes in blocks)
    listed = {name.lower().replace("_", "-") for name, *_ in blocks}
    free = {one for one in listed - pinned if not one.startswith(("cuda-", "nvidia-", "triton==", "setuptools=="))}
    assert free == set(), "of another version than the tests ran with"
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {one.split("==")[0] for one in listed} | {"torch", "torchvision"}
    assert {re.split(r"[\[<>=]", one)[0].lower() for one in asked} <= names


def test_dockers_own_client_reads_the_file() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("the docker client has no compose plugin here")
    command = ["docker", "compose", "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == set(SERVICES)
