"""Do the examples of deployment name commands and options that there are?"""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headwater import settings
from headwater.cli import app

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"


def refuse_unknown(arguments: list[str]) -> None:
    """Find the command and parse its options, as the program would, without running it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, name
        command = command.commands[name]
    context = command.make_context(command.name, arguments, resilient_parsing=False)
    context.close()


def test_the_unit_of_systemd_runs_a_command_that_there_is() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "headwater-workers.service")
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "headwater"
    # It has more time to stop than its handlers have to finish.
    grace = float(arguments[arguments.index("--grace-seconds") + 1])
    assert float(service["TimeoutStopSec"]) > grace
    refuse_unknown(arguments)
    names = re.findall(r"(HEADWATER_\w+)=(\S+)", service["Environment"])
    settings.load(dict(names))


def test_the_container_runs_and_checks_by_commands_that_there_are() -> None:
    lines = (FOLDER / "Containerfile").read_text()
    for found in re.findall(r"^(?:CMD|HEALTHCHECK .*CMD) (\[.*\])$", lines, re.MULTILINE):
        arguments = json.loads(found)
        refuse_unknown(arguments[1:] if arguments[0] == "headwater" else arguments)
    settings.load(dict(re.findall(r"\b(HEADWATER_\w+)=(\S+)", lines)))


def test_the_composition_runs_commands_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    composed = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    ours = {name: service for name, service in composed["services"].items() if "build" in service}
    assert set(ours) == {"migrate", "workers", "kafka"}
    for service in ours.values():
        assert (FOLDER / service["build"]["dockerfile"]).exists()
        refuse_unknown(list(service["command"]))
        assert all(name in settings.VARIABLES for name in service["environment"])
    for name in ("workers", "kafka"):
        assert ours[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
