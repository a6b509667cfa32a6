"""Does the embedded Postgres start, attach, survive and say what is wrong?"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from headwater.embedded import EmbeddedError, Postgres, find_binaries, processes
from patience import PATIENCE_SECONDS

Make = Callable[..., Postgres]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes servers that are gone when the test ends."""
    made: list[Postgres] = []

    def one(
        where: str | Path = "server", *, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> Postgres:
        server = Postgres(tmp_path / where, port=port, settings=settings)
        made.append(server)
        return server

    yield one
    for server in made:
        server.kill()


def ask(server: Postgres, query: str, database: str = "postgres") -> object:
    with psycopg.connect(server.dsn(database), connect_timeout=PATIENCE_SECONDS) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[arg-type]
        assert row is not None
        return row[0]


def test_it_starts_on_a_socket_only_with_logical_and_durable_settings(make: Make) -> None:
    server = make()
    assert not server.running
    assert server.pid is None
    server.start()
    assert server.running
    assert server.port is None
    assert ask(server, "show listen_addresses") == ""
    for name, value in {
        "wal_level": "logical",
        "fsync": "on",
        "synchronous_commit": "on",
        "max_connections": "100",
        "max_prepared_transactions": "20",
        "max_wal_senders": "10",
        "max_replication_slots": "10",
        "server_encoding": "UTF8",
        "lc_collate": "C",
    }.items():
        shown = "select datcollate from pg_database limit 1" if name == "lc_collate" else f"show {name}"
        assert ask(server, shown) == value, name
    socket_dir = Path(str(ask(server, "show unix_socket_directories")))
    assert socket_dir.stat().st_mode & 0o077 == 0
    server.stop()
    assert not server.running


def test_a_setting_can_be_changed_but_not_those_that_follow_from_arguments(make: Make) -> None:
    server = make(settings={"max_connections": "17"})
    server.start()
    assert ask(server, "show max_connections") == "17"
    with pytest.raises(EmbeddedError, match="listen_addresses"):
        make("other", settings={"listen_addresses": "*"})


def test_a_database_is_made_once(make: Make) -> None:
    server = make()
    server.start()
    server.ensure_database('odd "name"')
    server.ensure_database('odd "name"')
    assert ask(server, "select current_database()", 'odd "name"') == 'odd "name"'


def test_a_port_needs_the_password_and_listens_on_loopback_only(make: Make) -> None:
    server = make(port=0)
    server.start()
    assert server.port is not None
    assert ask(server, "show listen_addresses") == "127.0.0.1"
    assert ask(server, "select inet_client_addr()::text") == "127.0.0.1/32"
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(server.dsn("postgres"), password="wrong", connect_timeout=PATIENCE_SECONDS)
    assert (server.data_dir / "password").stat().st_mode & 0o077 == 0


def test_a_second_object_attaches_and_leaves_the_server_to_the_first(make: Make) -> None:
    first = make(port=0)
    first.start()
    with make(port=0) as second:
        assert second.pid == first.pid
        assert second.dsn("postgres") == first.dsn("postgres")
        assert not second.started_here
    assert first.running
    by_socket = make()
    by_socket.start()
    assert ask(by_socket, "select inet_client_addr()") is None
    by_socket.stop()
    assert not first.running
    first.start()
    assert first.running


def test_attaching_with_another_port_is_refused(make: Make) -> None:
    server = make()
    server.start()
    with pytest.raises(EmbeddedError, match=r"already runs .* without a port"):
        make(port=0).start()


def test_many_starts_at_once_make_one_server(make: Make) -> None:
    servers = [make() for _ in range(4)]
    failures: list[BaseException] = []

    def start(server: Postgres) -> None:
        try:
            server.start()
        except EmbeddedError as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert failures == []
    assert len({server.pid for server in servers}) == 1
    assert sum(server.started_here for server in servers) == 1


def test_two_servers_run_side_by_side(make: Make) -> None:
    one, other = make("one"), make("other", port=0)
    one.start()
    other.start()
    one.ensure_database("mine")
    assert one.pid != other.pid
    assert ask(other, "select count(*) from pg_database where datname = 'mine'") == 0
    one.kill()
    assert ask(other, "select 1") == 1


def test_a_busy_port_is_named(make: Make) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = make(port=port)
        with pytest.raises(EmbeddedError, match=rf"port {port} .* in use"):
            server.start()
        assert not server.running
    server.start()
    assert server.port == port


def test_a_wrong_setting_is_shown_from_the_log(make: Make) -> None:
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        make(settings={"no_such_setting": "1"}).start()


def test_a_path_too_long_for_a_socket_works(make: Make, tmp_path: Path) -> None:
    server = make(Path("a" * 80, "b" * 80, "c d'e"))
    server.start()
    assert ask(server, "select 1") == 1
    other = make(Path("a" * 80, "b" * 80, "c d'e"))
    other.start()
    assert other.pid == server.pid


@pytest.mark.crash
def test_committed_rows_survive_a_kill_during_writes(make: Make) -> None:
    server = make()
    server.start()
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("create table fact (number integer primary key)")
    committed: list[int] = []
    enough = threading.Event()

    def write() -> None:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            for number in range(1_000_000):
                try:
                    connection.execute("insert into fact values (%s)", (number,))
                except psycopg.OperationalError:
                    return
                committed.append(number)
                if number == 200:
                    enough.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert enough.wait(PATIENCE_SECONDS)
    server.kill()
    writer.join(PATIENCE_SECONDS)
    assert not server.running
    server.start()
    stored = ask(server, "select array_agg(number order by number) from fact")
    assert isinstance(stored, list)
    # The row in flight may have been stored without its answer arriving.
    assert stored in (committed, [*committed, len(committed)])


@pytest.mark.crash
def test_a_postmaster_killed_alone_leaves_orphans_that_do_not_stop_the_next(make: Make) -> None:
    server = make()
    server.start()
    pid = server.pid
    assert pid is not None
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        # A stopped process cannot notice that its postmaster died, so this orphan stays.
        os.kill(row[0], signal.SIGSTOP)
        # Nobody reaps it: the object that started it is not asked, another one starts the next.
        os.kill(pid, signal.SIGKILL)
        other = make()
        other.start()
    assert other.pid != pid
    assert ask(other, "select 1") == 1
    assert processes.command_line(row[0]) is None


@pytest.mark.crash
def test_a_pid_file_that_names_a_stranger_does_not_stop_a_start(make: Make) -> None:
    server = make()
    server.start()
    pid_file = server.data_dir / "pgdata" / "postmaster.pid"
    left = pid_file.read_text().splitlines()
    server.kill()
    # As after a reboot, when the number belongs to some living process.
    waits = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as stranger:
        pid_file.write_text("\n".join([str(stranger.pid), *left[1:]]) + "\n")
        assert not server.running
        server.start()
        assert ask(server, "select 1") == 1
        assert stranger.poll() is None


@pytest.mark.crash
def test_a_kill_leaves_no_process_behind(make: Make) -> None:
    server = make()
    server.start()
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        os.kill(row[0], signal.SIGSTOP)
        server.kill()
    assert processes.command_line(row[0]) is None


@pytest.mark.crash
def test_a_start_cut_short_is_done_again(make: Make) -> None:
    server = make()
    half = server.data_dir / "pgdata.new" / "base"
    half.mkdir(parents=True)
    (half / "junk").write_text("junk")
    server.start()
    assert ask(server, "select 1") == 1


def test_it_outlives_the_program_that_started_it_and_its_terminal(make: Make) -> None:
    server = make()
    program = "import sys, pathlib; from headwater.embedded import Postgres;Postgres(pathlib.Path(sys.argv[1])).start()"
    starter = subprocess.Popen([sys.executable, "-c", program, server.data_dir], start_new_session=True)
    assert starter.wait(PATIENCE_SECONDS) == 0
    assert server.pid is not None
    # Ctrl-C goes to a terminal's process group: the server must be in another.
    assert os.getpgid(server.pid) == server.pid
    assert os.getsid(server.pid) == server.pid
    assert ask(server, "select 1") == 1
    server.stop()
    assert not server.running


def test_data_of_a_version_without_programs_is_refused_with_advice(make: Make) -> None:
    server = make()
    (server.data_dir / "pgdata").mkdir(parents=True)
    (server.data_dir / "pgdata" / "PG_VERSION").write_text("11\n")
    with pytest.raises(EmbeddedError, match="no Postgres 11 found"):
        server.start()


def test_programs_are_found_by_version() -> None:
    found = find_binaries()
    assert found.major >= 15
    assert find_binaries(major=found.major) == found
    assert Path(found.program("initdb")).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_root_runs_it_as_the_owner_of_the_directory_even_below_a_closed_one(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server = make()
    server.data_dir.mkdir()
    os.chown(server.data_dir, 65534, 65534)
    server.start()
    assert ask(server, "select 1") == 1
    assert server.pid is not None
    assert Path(f"/proc/{server.pid}").stat().st_uid == 65534
    assert (server.data_dir / "pgdata").stat().st_uid == 65534
    server.kill()
    server.start()
    assert ask(server, "select 1") == 1
