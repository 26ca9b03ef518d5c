"""The Debian packages, in a root of their own: installed, upgraded, removed, purged.

The root is this machine's, seen through an overlay in a mount namespace: what the packages write stays in the
test's directory. In place of the product the packages hold programs that do nothing; ``make deb-try`` tries
the whole product in a clean root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LIMIT_S = 300
OVERLAY = "mount -t overlay overlay -o lowerdir=/,upperdir={0}/upper,workdir={0}/work {0}/root"
NEEDED = ("dpkg-deb", "adduser", "unshare")


def can_overlay(folder: Path) -> bool:
    """Whether this user, on this kernel and file system, may mount an overlay."""
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    command = ["unshare", "--mount", "sh", "-c", OVERLAY.format(folder)]
    return subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S).returncode == 0


@dataclass
class CleanRoot:
    """A root whose changes are in ``upper``."""

    folder: Path

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    def run(self, script: str) -> str:
        """Run a script in it; returns what it printed."""
        path = self.upper / "script.sh"
        path.write_text(f"set -eu\nexport DEBIAN_FRONTEND=noninteractive\n{script}")
        inner = f"{OVERLAY.format(self.folder)} && mount -t tmpfs tmpfs {self.folder}/root/run && "
        inner += f"exec chroot {self.folder}/root sh /script.sh"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inner],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, package: Path, *options: str) -> str:
        shutil.copy(package, self.upper / "package.deb")
        return self.run(f"dpkg {' '.join(options)} --force-depends -i /package.deb")

    def state(self, *paths: str) -> list[str]:
        """Owner, group and mode of each path; "gone" for one that is not there."""
        script = "".join(f"stat -c '%U:%G %a' {path} 2>/dev/null || echo gone\n" for path in paths)
        return self.run(script).splitlines()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Builds a package of a kind and a version, with programs that do nothing."""
    folder = tmp_path_factory.mktemp("packages")
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("sla", "sla-server", "gateway-agent"):
        (programs / name).write_text("#!/bin/sh\necho stub\n")
        (programs / name).chmod(0o755)

    def made(kind: str, version: str) -> Path:
        done = subprocess.run(
            [str(ROOT / "deploy/debian/build.sh"), kind, str(folder)],
            env={**os.environ, "VENV": str(folder / "venv"), "VERSION": version},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    return made


@pytest.fixture
def root(tmp_path: Path) -> Iterator[CleanRoot]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or not can_overlay(tmp_path):
        pytest.skip(f"needs root, overlay mounts, and {', '.join(missing) or NEEDED}")
    yield CleanRoot(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_the_server_is_installed_upgraded_removed_and_purged(
    build: Callable[[str, str], Path], root: CleanRoot
) -> None:
    said = root.install(build("server", "1.0"))
    assert "systemctl enable --now sla-server" in said
    assert root.state("/etc/sla/server.toml", "/var/lib/sla-server", "/usr/bin/sla-server") == [
        "root:sla 640",
        "sla:sla 700",
        "root:root 777",
    ]
    users = root.run("for name in sla sla-policy sla-relay sla-agent; do getent passwd $name; done")
    assert [line.split(":")[-1] for line in users.splitlines()] == ["/usr/sbin/nologin"] * 4
    assert root.run("sla-server; dpkg -L storage-sla-server").startswith("stub\n")

    root.run("echo '# mine' >>/etc/sla/server.toml; chmod 600 /etc/sla/server.toml")
    root.run("touch /var/lib/sla-server/sla.db")
    root.install(build("server", "1.1"), "--force-confdef")
    assert "# mine" in root.run("cat /etc/sla/server.toml")
    assert root.state("/etc/sla/server.toml") == ["root:sla 600"], "an administrator's mode stays"
    assert root.run("dpkg-query -W -f '${Version}' storage-sla-server") == "1.1"

    root.run("dpkg -r storage-sla-server")
    assert root.state(
        "/opt/sla", "/usr/bin/sla-server", "/var/lib/sla-server/sla.db", "/etc/sla/server.toml"
    ) == [
        "gone",
        "gone",
        "root:root 644",
        "root:sla 600",
    ]
    root.run("dpkg -P storage-sla-server")
    assert root.state("/var/lib/sla-server", "/etc/sla") == ["gone", "gone"]
    assert root.run("getent passwd sla").startswith("sla:"), "its number is given to no other user"


SYSTEMD = """mkdir -p /run/systemd/system
cat >/usr/bin/systemctl <<'END'
#!/bin/sh
case $* in *is-active*sla-server.service) exit 0 ;; *is-active*) exit 3 ;; esac
echo "systemctl $*"
END
chmod 755 /usr/bin/systemctl
"""


def test_a_server_that_was_stopped_for_an_upgrade_that_failed_runs_again(
    build: Callable[[str, str], Path], root: CleanRoot
) -> None:
    root.install(build("server", "1.0"))
    shutil.copy(build("server", "1.1"), root.upper / "newer.deb")
    said = root.run(
        f"{SYSTEMD}dpkg-deb -R /newer.deb /newer; printf '#!/bin/sh\\nexit 1\\n' >/newer/DEBIAN/preinst\n"
        "chmod 755 /newer/DEBIAN/preinst; dpkg-deb -b /newer /newer.deb >/dev/null\n"
        "dpkg --force-depends -i /newer.deb 2>&1 && exit 1; ls /run/storage-sla-upgrade 2>&1 || true"
    )
    assert said.index("systemctl stop sla-server.service") < said.index("systemctl start sla-server.service")
    assert "systemctl start sla-relay.service" not in said
    assert "cannot access '/run/storage-sla-upgrade'" in said, "no later upgrade takes it for its own"


def test_the_interpreter_of_a_package_is_a_link_to_that_of_debian(tmp_path: Path) -> None:
    """A copy would get none of its security updates. ``pip`` is played by scripts."""
    python, pip = tmp_path / "python", tmp_path / "pip"
    python.write_text(
        '#!/bin/sh\ncase $* in "-m pip wheel"*) touch "$8/storage_sla_server-1.whl" ;;\n'
        '*) exec /usr/bin/python3 "$@" ;; esac\n'
    )
    pip.write_text(
        '#!/bin/sh\nbin=${4%/python}; printf \'#!%s\\n\' "$4" >"$bin/gateway-agent"; chmod 755 "$bin"/g*\n'
    )
    for program in (python, pip):
        program.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "deploy/debian/build.sh"), "agent", str(tmp_path / "out")],
        env={**os.environ, "PYTHON": str(python), "PIP_PYTHON": str(pip), "VERSION": "1.0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    subprocess.run(["dpkg-deb", "-x", done.stdout.strip(), tmp_path / "tree"], check=True, timeout=LIMIT_S)
    programs = tmp_path / "tree/opt/sla-agent/bin"
    assert (programs / "python3").readlink() == Path("/usr/bin/python3")
    assert (programs / "gateway-agent").read_text() == "#!/opt/sla-agent/bin/python\n"


def test_server_and_agent_are_installed_side_by_side_and_apart(
    build: Callable[[str, str], Path], root: CleanRoot
) -> None:
    root.install(build("server", "1.0"))
    assert "agent.toml" in root.install(build("agent", "1.0"))
    assert "gateway-agent upgrade" in root.install(build("agent", "1.1")), (
        "it is not restarted: I/O passes through"
    )
    unit = root.run("cat /lib/systemd/system/gateway-agent.service")
    assert "ExecStart=/opt/sla-agent/bin/gateway-agent run" in unit
    assert "/opt/sla/" not in unit
    root.run("touch /etc/sla/agent.toml; dpkg -P storage-sla-agent")
    assert root.state("/etc/sla/agent.toml", "/var/lib/gateway-agent", "/etc/sla/server.toml") == [
        "gone",
        "gone",
        "root:sla 640",
    ]


def test_units_of_the_packages_are_such_that_systemd_takes_them(
    build: Callable[[str, str], Path], root: CleanRoot
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    root.install(build("server", "1.0"))
    root.install(build("agent", "1.0"))
    units = " ".join(sorted(path.name for path in (ROOT / "deploy" / "systemd").iterdir()))
    said = root.run(
        f"cd /lib/systemd/system; SYSTEMD_LOG_LEVEL=warning systemd-analyze verify --man=no {units} 2>&1"
    )
    assert said == ""


def test_what_is_neither_server_nor_agent_is_refused() -> None:
    command = [str(ROOT / "deploy/debian/build.sh"), "other", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (64, "build.sh: other is neither server nor agent\n")
