"""Do the examples of deployment name commands, options, extras and ports that there are, and that fit together?"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headwater import settings
from headwater.cli import app
from headwater.cli.commands.serve import MAX_KAFKA_CONNECTIONS, OTHER_FILES, STOP_SECONDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
SERVERS = ("http", "grpc", "kafka")


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Find the command and parse its options, as the program would, without running it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, name
        command = command.commands[name]
    with command.make_context(command.name, arguments, resilient_parsing=False) as context:
        found: dict[str, Any] = context.params
        return found


def ports(options: dict[str, Any]) -> set[int]:
    return {int(options[server].rpartition(":")[2]) for server in SERVERS}


def extras(text: str) -> set[str]:
    found = re.search(r"'headwater\[([\w,]+)\]'", text)
    assert found is not None
    return set(found[1].split(","))


def refuse_bad_server(options: dict[str, Any], stop_seconds: float) -> None:
    """One that opens every protocol, asks callers who they are, and is not killed while it stops."""
    assert all(options[server] for server in (*SERVERS, "webhooks", "authenticate"))
    # What listens everywhere has no name of its own that clients of Kafka could come back to.
    assert options["advertise"] not in (None, "0.0.0.0")
    assert stop_seconds >= options["grace_seconds"] + STOP_SECONDS


def unit(name: str) -> configparser.SectionProxy:
    read = configparser.ConfigParser(strict=True, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    # As systemd does: a line that ends so goes on in the next.
    read.read_string((FOLDER / name).read_text().replace("\\\n", " "))
    settings.load(dict(re.findall(r"(HEADWATER_\w+)=(\S+)", read["Service"]["Environment"])))
    return read["Service"]


def test_the_unit_of_workers_runs_a_command_that_there_is() -> None:
    service = unit("headwater-workers.service")
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "headwater"
    # It has more time to stop than its handlers have to finish.
    assert float(service["TimeoutStopSec"]) > parsed(arguments)["grace_seconds"]


def test_the_unit_of_servers_opens_every_protocol_and_gives_it_time_and_files() -> None:
    service = unit("headwater-server.service")
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "headwater"
    options = parsed(arguments)
    refuse_bad_server(options, float(service["TimeoutStopSec"]))
    assert int(service["LimitNOFILE"]) >= options["connections"] + MAX_KAFKA_CONNECTIONS + OTHER_FILES
    # Killing all at once would take the processes from the one that tells them to stop.
    assert service["KillMode"] == "mixed"


def test_the_container_serves_by_every_protocol_with_the_extras_that_it_needs() -> None:
    lines = (FOLDER / "Containerfile").read_text()
    (served,) = re.findall(r"^CMD (\[.*\])$", lines, re.MULTILINE)
    options = parsed(json.loads(served))
    (exposed,) = re.findall(r"^EXPOSE (.*)$", lines, re.MULTILINE)
    assert set(map(int, exposed.split())) == ports(options)
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", lines, re.MULTILINE)
    program, *arguments = json.loads(check)
    assert program == "headwater"
    parsed(arguments)
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"http", "grpc", "kafka", "webhooks"} <= extras(lines) <= set(there)
    settings.load(dict(re.findall(r"\b(HEADWATER_\w+)=(\S+)", lines)))


def test_the_composition_runs_commands_that_there_are_and_its_ports_agree() -> None:
    yaml = pytest.importorskip("yaml")
    composed = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    ours = {name: service for name, service in composed["services"].items() if "build" in service}
    assert set(ours) == {"migrate", "workers", "server"}
    found = {}
    for name, service in ours.items():
        assert (FOLDER / service["build"]["dockerfile"]).exists()
        found[name] = parsed(list(service["command"]))
        assert all(variable in settings.VARIABLES for variable in service["environment"])
    for name in ("workers", "server"):
        assert ours[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    server, options = ours["server"], found["server"]
    refuse_bad_server(options, float(server["stop_grace_period"].removesuffix("s")))
    published = {tuple(one.split(":")) for one in server["ports"]}
    # Nothing is encrypted, so nobody but this machine may come; and a broker tells its clients the port that it knows.
    assert published == {("127.0.0.1", str(port), str(port)) for port in ports(options)}
    assert server["ulimits"]["nofile"] >= options["connections"] + MAX_KAFKA_CONNECTIONS + OTHER_FILES
    asked = re.search(r"http://127\.0\.0\.1:(\d+)/ready", server["healthcheck"]["test"][-1])
    assert asked is not None
    assert int(asked[1]) == int(options["http"].rpartition(":")[2])


def test_the_manifests_run_commands_that_there_are_and_their_probes_agree() -> None:
    yaml = pytest.importorskip("yaml")
    found = {
        (each["kind"], each["metadata"]["name"]): each
        for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    }
    pods = {name: each["spec"]["template"]["spec"] for (kind, name), each in found.items() if kind != "Service"}
    assert set(pods) == {"headwater-migrate", "headwater-server", "headwater-workers"}
    options = {}
    for name, pod in pods.items():
        (container,) = pod["containers"]
        options[name] = parsed([str(argument) for argument in container["args"]])
        assert all(variable["name"] in settings.VARIABLES for variable in container["env"])
        assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "headwater", "key": "dsn"}
        assert pod["securityContext"]["runAsNonRoot"]
        # The user of the image.
        assert f"--uid {pod['securityContext']['runAsUser']} " in (FOLDER / "Containerfile").read_text()
        assert not container["securityContext"]["allowPrivilegeEscalation"]
    for name in ("headwater-server", "headwater-workers"):
        assert pods[name]["terminationGracePeriodSeconds"] > options[name]["grace_seconds"]
        # The selector of a deployment must match its pods, or the cluster refuses it.
        deployment = found["Deployment", name]["spec"]
        assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    server, (container,) = options["headwater-server"], pods["headwater-server"]["containers"]
    assert server["authenticate"]
    assert server["webhooks"]
    listening = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert listening == {name: int(server[name].rpartition(":")[2]) for name in ("http", "grpc")}
    probes = {kind: container[kind]["httpGet"] for kind in ("readinessProbe", "livenessProbe")}
    assert probes == {
        "readinessProbe": {"path": "/ready", "port": "http"},
        "livenessProbe": {"path": "/health", "port": "http"},
    }
    # The hook before the stop and the grace of the server fit into the grace of the pod.
    (sleep,) = re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][-1])
    needed = int(sleep) + server["grace_seconds"] + STOP_SECONDS
    assert pods["headwater-server"]["terminationGracePeriodSeconds"] >= needed
    service = found["Service", "headwater"]["spec"]
    assert service["selector"] == found["Deployment", "headwater-server"]["spec"]["selector"]["matchLabels"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == listening
