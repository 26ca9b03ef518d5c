"""The gateway by other people's clients, before other people's servers; these are the yardstick.

    file      file mode            nbdkit    before nbdkit's file plugin       qemu-nbd    before qemu-nbd
    nbdkit itself, qemu-nbd itself: the same clients without the gateway

One plane serves all three volumes. Bounded: all of it takes less than two minutes on two processors. What
clients see of structured replies is in other tests. Every wait is for an event, with a deadline.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway_agent.nbd import protocol as p
from tests.fuzz.nbd_clients import exactly, negotiate
from tests.support.paths import ROOT
from tests.support.planes import SIZE, Processes, can_connect, wait_for

MIB = 1 << 20
PLANES = ("file", "nbdkit", "qemu-nbd")
PEERS = ("nbdkit itself", "qemu-nbd itself")
SEED = 15
LIMIT_S = 120
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"


class Setup:
    """Servers, and a plane before them. Each volume has an image of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.run = Processes(folder)
        for name in ("file", "nbdkit", "qemu-nbd"):
            self.blank(name)
        # One thread: 1.32 ends with an assertion when a client leaves while another thread answers it.
        self.run.nbdkit(self.folder / "nbdkit.sock", "--threads=1", "file", str(self.image("nbdkit")))
        self.run.start(
            "qemu-nbd", "--format=raw", "--persistent", "--shared=0", "--discard=unmap",
            f"--socket={folder}/qemu.sock", str(self.image("qemu-nbd")),
        )  # fmt: skip
        wait_for(
            "qemu-nbd listens", lambda: (folder / "qemu.sock").exists() and can_connect(folder / "qemu.sock")
        )
        self.run.plane(
            [
                {"volume": "file", "backend": "b", "file": str(self.image("file")), "workers": 2},
                {"volume": "nbdkit", "backend": "b", "upstream": f"nbd+unix:///?socket={folder}/nbdkit.sock"},
                {"volume": "qemu-nbd", "backend": "b", "upstream": f"nbd+unix:///?socket={folder}/qemu.sock"},
            ],
            client_rule="address",
        )

    def image(self, kind):
        """What is behind a volume, or a peer."""
        return self.folder / f"{kind.removesuffix(' itself')}.img"

    def blank(self, kind):
        with open(self.image(kind), "wb") as file:
            file.truncate(SIZE)

    def uri(self, kind):
        if kind in PEERS:
            return f"nbd+unix:///?socket={self.folder}/{'qemu' if 'qemu' in kind else 'nbdkit'}.sock"
        return f"nbd+unix:///{kind}?socket={self.folder}/gw.sock"

    def call(self, *command, status=0):
        # The system's own Python has libnbd; not that of these tests.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=self.folder,
            env={**os.environ, "PATH": SYSTEM},
        )
        assert (done.returncode == 0) == (status == 0), f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def nbdsh(self, uri, *lines):
        """What a script of libnbd's shell prints: one JSON value."""
        text = "\n".join(("import json", *lines))
        return json.loads(self.call("nbdsh", "-u", uri, "-c", text))


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    for tool in ("fio", "nbdkit", "nbdcopy", "qemu-img", "qemu-io", "nbdsh", "nbd-client"):
        assert shutil.which(tool, path=SYSTEM), f"{tool} is missing: deploy/setup.sh test"
    made = Setup(tmp_path_factory.mktemp("c"))
    with made.run:
        yield made


# -- fio


@pytest.mark.parametrize("kind", PLANES)
@pytest.mark.parametrize(
    ("depth", "sizes", "how"),
    [
        (1, "512-4m", "--size=12m"),
        (32, "512-64k", "--size=8m"),
        (128, "512-4k", "--size=2m"),
        (32, "4m-4m", "--size=32m"),
    ],
)
def test_fio_finds_what_it_has_written(setup, kind, depth, sizes, how):
    if depth == 128 and kind == "qemu-nbd":
        how = "--size=1m"  # qemu-nbd does some 10,000 a second
    shown = setup.call(
        "fio", "--name=job", "--ioengine=nbd", f"--uri={setup.uri(kind)}", "--rw=randwrite",
        f"--iodepth={depth}",
        f"--bsrange={sizes}", how, "--verify=crc32c", "--verify_fatal=1", "--fsync=64",
        "--thread", f"--randseed={SEED}", "--output-format=json",
    )  # fmt: skip
    job = json.loads(shown[shown.index("{") :])["jobs"][0]
    assert job["error"] == 0
    assert job["read"]["total_ios"] > 0, "it has verified"


# -- QEMU's tools


@pytest.mark.parametrize("kind", PLANES + PEERS)
def test_qemu_img_converts_and_compares(setup, kind):
    image, back = setup.folder / "in.img", setup.folder / "out.img"
    image.write_bytes(random.Random(SEED).randbytes(3 * MIB + 512) + bytes(SIZE - 3 * MIB - 512))
    setup.call(
        "qemu-img", "convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", str(image), setup.uri(kind)
    )
    setup.call("qemu-img", "compare", "-f", "raw", "-F", "raw", str(image), setup.uri(kind))
    setup.call("qemu-img", "convert", "-f", "raw", "-O", "raw", setup.uri(kind), str(back))
    assert back.read_bytes() == image.read_bytes() == setup.image(kind).read_bytes()


QEMU_IO = (
    "write -P 1 0 64k", "read -P 1 0 64k", "write -P 2 512 512", "read -P 2 512 512", "read -P 1 1k 63k",
    "write -z 4k 8k", "read -P 0 4k 8k", "write -f -P 3 1M 1M", "flush", "discard 1M 1M", "write -P 4 1M 4k",
    "aio_write -P 5 2M 1M", "aio_write -P 6 3M 1M", "aio_flush", "read -P 5 2M 1M", "read -P 6 3M 1M",
    "write -P 7 7M 1M", "read -P 7 7M 1M", "writev -P 8 6M 4k 8k 512", "readv -P 8 6M 4k 8k 512", "length",
)  # fmt: skip


@pytest.mark.parametrize("kind", PLANES + PEERS)
def test_a_qemu_io_script_reads_what_it_wrote(setup, kind):
    commands = [part for command in QEMU_IO for part in ("-c", command)]
    said = setup.call("qemu-io", "--format=raw", *commands, setup.uri(kind))
    assert "Pattern verification failed" not in said
    assert "error" not in said.lower()
    assert "32 MiB" in said, "its length"
    assert setup.image(kind).read_bytes()[512:1024] == b"\2" * 512


# -- libnbd's tools


@pytest.mark.parametrize("kind", PLANES)
@pytest.mark.parametrize(("connections", "requests", "size"), [(1, 1, 65_536), (4, 32, 65_536), (8, 8, MIB)])
def test_nbdcopy_copies_there_and_back(setup, kind, connections, requests, size):
    image, back = setup.folder / "in.img", setup.folder / "out.img"
    image.write_bytes(random.Random(connections).randbytes(5 * MIB) + bytes(MIB) + os.urandom(SIZE - 6 * MIB))
    how = (f"--connections={connections}", f"--requests={requests}", f"--request-size={size}")
    setup.call("nbdcopy", "--flush", *how, str(image), setup.uri(kind))
    setup.call("nbdcopy", *how, setup.uri(kind), str(back))
    assert back.read_bytes() == image.read_bytes() == setup.image(kind).read_bytes()


@pytest.mark.parametrize("kind", PLANES)
def test_an_nbdsh_script_uses_every_command(setup, kind):
    said = setup.nbdsh(
        setup.uri(kind),
        "found = []",
        "h.pwrite(b'a' * 4096, 0, nbd.CMD_FLAG_FUA if h.can_fua() else 0)",
        "h.pwrite(b'b' * 512, 1024)",
        "found.append(h.pread(4096, 0) == b'a' * 1024 + b'b' * 512 + b'a' * 2560)",
        "h.zero(2048, 0)",
        "found.append(h.pread(4096, 0) == bytes(2048) + b'a' * 2048)",
        "h.trim(4096, 0)",
        "h.flush()",
        "buffers = [nbd.Buffer(4096) for _ in range(64)]",
        "content = [nbd.Buffer.from_bytearray(bytearray([n]) * 4096) for n in range(64)]",
        "cookies = [h.aio_pwrite(each, n * 4096) for n, each in enumerate(content)]",
        "while cookies: h.poll(-1); cookies = [c for c in cookies if not h.aio_command_completed(c)]",
        "cookies = [h.aio_pread(each, n * 4096) for n, each in enumerate(buffers)]",
        "while cookies: h.poll(-1); cookies = [c for c in cookies if not h.aio_command_completed(c)]",
        "found.append(all(each.to_bytearray() == bytes([n]) * 4096 for n, each in enumerate(buffers)))",
        "print(json.dumps([h.get_size(), found]))",
    )
    assert said == [SIZE, [True, True, True]]


def test_the_lists_of_other_peoples_clients_name_the_volumes(setup):
    names = sorted(PLANES)
    listed = json.loads(
        setup.call("nbdinfo", "--list", "--json", f"nbd+unix:///?socket={setup.folder}/gw.sock")
    )
    assert sorted(each["export-name"] for each in listed["exports"]) == names
    said = setup.call("nbd-client", "-l", "-unix", f"{setup.folder}/gw.sock")
    assert sorted(line.strip() for line in said.splitlines() if line.strip() in names) == names


# -- answers to requests that no client should send


def answer(what):
    """Lines for nbdsh: the name of a request's error, or ``ok``."""
    return [
        "try:",
        f"    {what}; found.append('ok')",
        "except nbd.Error as ex: found.append(ex.errno)",
    ]


ASKED = {
    "read across the end": "h.pread(4096, h.get_size() - 512)",
    "write across the end": "h.pwrite(bytes(4096), h.get_size() - 512)",
    "zeroes across the end": "h.zero(4096, h.get_size() - 512)",
    "trim across the end": "h.trim(4096, h.get_size() - 512)",
    "read far beyond the end": "h.pread(4096, 1 << 62)",
    "unknown command flag": "h.pwrite(bytes(512), 0, 1 << 14)",
}


def documented():
    """The table of docs/formats/nbd.md: case to the answers of gateway, nbdkit and qemu-nbd."""
    page = (ROOT / "docs" / "formats" / "nbd.md").read_text()
    table = page.split("## Answers to requests beyond what was offered\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    return {row[0]: row[1:4] for row in rows[2:]}


def test_answers_to_wrong_requests_are_those_of_the_page(setup):
    lines = [
        "h.set_strict_mode(0)",
        "found = []",
        *(line for each in ASKED.values() for line in answer(each)),
    ]
    lines += ["h.pread(512, 0)", "print(json.dumps(found))"]  # the connection lives on
    columns = {kind: setup.nbdsh(setup.uri(kind), *lines) for kind in (*PLANES, *PEERS)}
    assert columns["file"] == columns["nbdkit"] == columns["qemu-nbd"], "the gateway's, whatever is behind it"
    found = {
        case: [columns[kind][row] for kind in ("file", *PEERS)] for row, case in enumerate(ASKED)
    }  # fmt: skip
    assert found == documented()


SPOKEN = ("file", "nbdkit itself", "qemu-nbd itself")
"""Whose answers the columns of the page's tables are."""
NO_EXPORT = "none-such"
BEHIND_GREETING = {
    "STARTTLS to a server without TLS": (3, p.option(p.Opt.STARTTLS)),
    "SET_META_CONTEXT for an export that does not exist": (
        3,
        p.option(p.Opt.STRUCTURED_REPLY)
        + p.option(p.Opt.SET_META_CONTEXT, p.meta_context_data(NO_EXPORT, ["none:such"])),
    ),
    "export name with a NUL": (3, p.option(p.Opt.GO, p.go_data("fi\0le"))),
    "client without FIXED_NEWSTYLE": (0, p.option(p.Opt.LIST)),
    "option above 64 KiB": (3, p.option(4711, bytes(65_537))),
}
"""Flags and options of a client, by the case of the page; the answer to the last option counts."""
BEHIND_GO = {
    "a flush with an offset or length": p.request(p.Cmd.FLUSH, 1, 512, 512),
    "length 0 (the protocol leaves it open)": p.request(p.Cmd.READ, 1, 0, 0),
}
ALIKE = {
    "SET_META_CONTEXT for an export that does not exist": {"as for any other": "ACK"},
    "option above 64 KiB": {
        "as without the excess data: ERR_UNSUP or ERR_INVALID": "ERR_UNSUP",
        "as nbdkit": "ERR_UNSUP",
    },
    "length 0 (the protocol leaves it open)": {"served in file mode, else as the upstream": "served"},
}
"""Words of the page for an answer, where it says more than that."""


def differences():
    """The larger table of docs/formats/nbd.md: case to the answers of gateway, nbdkit and qemu-nbd."""
    page = (ROOT / "docs" / "formats" / "nbd.md").read_text()
    table = page.split("## Differences from nbdkit 1.32 and qemu-nbd 7.2 that the protocol allows\n")[1]
    lines = [line for line in table.split("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert all(len(row) == 5 and row[4] for row in rows), "each has its reason"
    return {row[0]: [ALIKE.get(row[0], {}).get(cell, cell) for cell in row[1:4]] for row in rows}


class Spoken(socket.socket):
    """A connection to one of ``SPOKEN``."""

    def __init__(self, setup, kind):
        super().__init__(socket.AF_UNIX)
        name = {"file": "gw", "nbdkit itself": "nbdkit", "qemu-nbd itself": "qemu"}[kind]
        self.export = "file" if kind == "file" else ""
        self.settimeout(LIMIT_S)
        self.connect(str(setup.folder / f"{name}.sock"))

    def answer_to(self, flags, options):
        """The type of the last answer to some options, or ``closed``."""
        exactly(self, p.GREETING.size)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has closed
            self.sendall(p.CLIENT_FLAGS.pack(flags) + options)
        last = p.OPTION.unpack_from(options, options.rindex(p.IHAVEOPT.to_bytes(8, "big")))[1]
        try:
            while True:
                _, option, kind, length = p.OPTION_REPLY.unpack(exactly(self, p.OPTION_REPLY.size))
                exactly(self, length)
                if option == last:
                    return p.Rep(kind).name
        except (AssertionError, ConnectionError):
            return "closed"

    def error_of(self, request):
        """How a request ends."""
        negotiate(self, self.export)
        self.sendall(request)
        error = p.SIMPLE_REPLY.unpack(exactly(self, p.SIMPLE_REPLY_BYTES))[1]
        return errno.errorcode[error] if error else "served"


def test_differences_in_negotiation_and_in_odd_requests_are_those_of_the_page(setup):
    found = {}
    for case, said in BEHIND_GREETING.items():
        found[case] = []
        for kind in SPOKEN:
            with Spoken(setup, kind) as sock:
                found[case].append(sock.answer_to(*said))
    for case, request in BEHIND_GO.items():
        found[case] = []
        for kind in SPOKEN:
            with Spoken(setup, kind) as sock:
                found[case].append(sock.error_of(request))
    page = differences()
    assert found == {case: page[case] for case in found}


# -- a file system


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts and uses loop devices")
@pytest.mark.parametrize("kind", PLANES)
def test_a_file_system_is_made_mounted_used_and_clean(setup, kind):
    folder = setup.folder / f"fs-{kind}"
    for name in ("point", "mount"):
        (folder / name).mkdir(parents=True)
    disk = folder / "point" / "nbd"
    with contextlib.ExitStack() as stack:
        fuse = setup.run.start("nbdfuse", str(folder / "point"), setup.uri(kind))
        stack.callback(lambda: (setup.call("umount", str(folder / "point")), fuse.wait(LIMIT_S)))
        wait_for("nbdfuse serves", disk.exists)
        device = setup.call("losetup", "--find", "--show", str(disk)).strip()
        stack.callback(setup.call, "losetup", "--detach", device)
        setup.call("mkfs.ext4", "-q", "-F", device)
        setup.call("mount", device, str(folder / "mount"))
        try:
            tree = folder / "mount" / "tree"
            shutil.copytree(ROOT / "docs" / "formats", tree)
            (tree / "large").write_bytes(random.Random(SEED).randbytes(2 * MIB))
            (tree / "messages.md").unlink()
        finally:
            setup.call("umount", str(folder / "mount"))
        setup.call("e2fsck", "-fn", device)
        setup.call("mount", "-o", "ro", device, str(folder / "mount"))
        try:
            assert (tree / "large").read_bytes() == random.Random(SEED).randbytes(2 * MIB)
            names = {path.name for path in (ROOT / "docs" / "formats").iterdir()}
            assert {path.name for path in tree.iterdir()} == names - {"messages.md"} | {"large"}
        finally:
            setup.call("umount", str(folder / "mount"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root uses loop devices")
def test_a_block_device_is_served_as_a_volume(setup, tmp_path):
    """As a raw disk, an LVM volume or a cloud disk would be."""
    (tmp_path / "disk.img").write_bytes(bytes(SIZE))
    device = setup.call("losetup", "--find", "--show", str(tmp_path / "disk.img")).strip()
    run = Processes(tmp_path)
    try:
        run.plane([{"volume": "vol-1", "backend": "b", "file": device, "workers": 2}])
        uri = f"nbd+unix:///vol-1?socket={tmp_path}/gw.sock"
        image = tmp_path / "in.img"
        image.write_bytes(random.Random(SEED).randbytes(SIZE))
        setup.call("nbdcopy", "--flush", "--connections=4", str(image), uri)
        setup.call("qemu-img", "compare", "-f", "raw", "-F", "raw", str(image), uri)
        assert Path(device).read_bytes() == image.read_bytes()
        setup.call(
            "qemu-io", "--format=raw", "-c", "write -z 0 1M", "-c", "discard 1M 1M", "-c", "flush", uri
        )
        assert Path(device).read_bytes()[:MIB] == bytes(MIB)
    finally:
        run.stop_all()
        setup.call("losetup", "--detach", device)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root uses loop devices")
def test_a_block_device_that_the_host_uses_itself_is_said(setup, tmp_path):
    """As with a file system on it: nothing keeps two that write to it apart."""
    (tmp_path / "disk.img").write_bytes(bytes(SIZE))
    device = setup.call("losetup", "--find", "--show", str(tmp_path / "disk.img")).strip()
    file = tmp_path / "check.toml"
    file.write_text(
        f'name = "gw-a"\nstate_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\n'
        f'[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/x"\n'
        f'[[export]]\nvolume = "vol-1"\nbackend = "b"\nfile = "{device}"\n'
    )
    run = Processes(tmp_path)

    def said():
        command = [sys.executable, "-m", "gateway_agent", "run", "--config", str(file), "--check-config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert "valid; 1 data plane, 1 volume" in done.stdout
        return done.stderr

    try:
        assert said() == ""
        mounted = os.open(device, os.O_RDONLY | os.O_EXCL)  # what mount does
        assert f"warning: export vol-1: {device}: this host uses the device itself" in said()
        run.plane([{"volume": "vol-1", "backend": "b", "file": device}])
        wait_for("it is in the log", lambda: "device-in-use" in run.logs())
        os.close(mounted)
    finally:
        run.stop_all()
        setup.call("losetup", "--detach", device)


# -- storage that fails, is slow, or comes back


class Faulty:
    """nbdkit with a filter behind a plane of its own."""

    def __init__(self, folder):
        self.folder, self.run = folder, Processes(folder)
        self.uri = f"nbd+unix:///vol-1?socket={folder}/gw.sock"

    def serve(self, *arguments):
        self.run.nbdkit(self.folder / "up.sock", "--threads=4", *arguments)
        up = f"nbd+unix:///?socket={self.folder}/up.sock"
        self.run.plane([{"volume": "vol-1", "backend": "b", "upstream": up}])
        return up


@pytest.fixture
def faulty(tmp_path):
    made = Faulty(tmp_path)
    with made.run:
        yield made


@pytest.mark.parametrize("error", ["EPERM", "ENOSPC", "ESHUTDOWN"])
def test_errors_of_the_storage_reach_the_client_with_their_number(setup, faulty, error):
    flag = f"error-file={faulty.folder}/on"
    up = faulty.serve("--filter=error", "memory", str(SIZE), f"error={error}", flag, "error-rate=100%")
    setup.nbdsh(faulty.uri, "h.pwrite(b'x' * 4096, 0)", "print(1)")
    (faulty.folder / "on").touch()
    lines = [
        "found = []",
        *answer("h.pread(4096, 0)"), *answer("h.pwrite(bytes(4096), 0)"), *answer("h.zero(4096, 0)"),
        *answer("h.trim(4096, 0)"),
        "print(json.dumps(found))",
    ]  # fmt: skip
    assert setup.nbdsh(faulty.uri, *lines) == setup.nbdsh(up, *lines) == [error] * 4
    (faulty.folder / "on").unlink()
    assert setup.nbdsh(faulty.uri, "print(json.dumps(h.pread(4096, 0) == b'x' * 4096))") is True


def test_storage_that_fails_now_and_then_gives_errors_and_never_wrong_data(setup, faulty):
    faulty.serve("--filter=error", "pattern", str(SIZE), "error=EIO", "error-pread-rate=20%")
    said = setup.nbdsh(
        faulty.uri,
        "import struct",
        "good, bad, wrong = 0, 0, 0",
        "for n in range(400):",
        "    try: data = h.pread(512, n * 512)",
        "    except nbd.Error as ex:",
        "        bad += ex.errno == 'EIO'",
        "        continue",
        "    good += 1",
        "    wrong += data != b''.join(struct.pack('>Q', at) for at in range(n * 512, n * 512 + 512, 8))",
        "print(json.dumps([good, bad, wrong]))",
    )
    good, bad, wrong = said
    assert (good + bad, wrong) == (400, 0)
    assert good > 0
    assert bad > 0


def test_slow_storage_answers_everything_once_and_in_any_order(setup, faulty):
    faulty.serve("--filter=delay", "memory", str(SIZE), "rdelay=30ms", "wdelay=10ms")
    shown = setup.call(
        "fio", "--name=job", "--ioengine=nbd", f"--uri={faulty.uri}", "--rw=randwrite", "--iodepth=32",
        "--bs=16k", "--size=1m", "--verify=crc32c", "--verify_fatal=1", "--thread", "--output-format=json",
    )  # fmt: skip
    job = json.loads(shown[shown.index("{") :])["jobs"][0]
    assert (job["error"], job["write"]["total_ios"], job["read"]["total_ios"]) == (0, 64, 64)


def test_storage_that_retries_is_waited_for(setup, faulty):
    """Its errors never reach the client: the retry filter stands behind the gateway, and opens it again."""
    flag = faulty.folder / "on"
    flag.touch()
    faulty.run.start(
        "bash", "-c", f'sleep 1; rm "{flag}"'
    )  # fmt: skip
    faulty.serve(
        "--filter=retry", "--filter=error", "memory", str(SIZE), "retries=10", "retry-delay=1",
        "retry-exponential=no", "error=EIO", f"error-file={flag}", "error-rate=100%",
    )  # fmt: skip
    assert setup.nbdsh(faulty.uri, "print(json.dumps(h.pread(512, 0) == bytes(512)))") is True
