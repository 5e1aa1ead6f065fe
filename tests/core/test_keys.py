import os
import stat
from pathlib import Path

import pytest

from agentgym.cli import app
from agentgym.errors import ConfigError
from agentgym.keys import Keys, load_keys, make_keys


def keys_of(folder: Path) -> Keys:
    keys = load_keys(folder)
    assert keys is not None
    return keys


def run(*arguments: object) -> int:
    return app([str(argument) for argument in arguments], standalone_mode=False) or 0


def test_a_folder_of_keys_holds_a_server_and_the_clients_that_may_connect(tmp_path: Path) -> None:
    (copied,) = make_keys(tmp_path / "keys", ["host-b"])
    server, client = keys_of(tmp_path / "keys"), keys_of(copied)
    assert server.server_secret is not None
    assert client.server_secret is None
    assert client.server_public == server.server_public
    assert client.client_secret != server.client_secret
    assert [server.name_of(public_of(keys)) for keys in (server, client)] == ["local", "host-b"]
    assert server.name_of(server.server_public) is None
    (tmp_path / "keys" / "allowed" / "host-b.pub").unlink()
    assert server.name_of(public_of(client)) is None


def public_of(keys: Keys) -> bytes:
    import zmq

    return keys.client_options()[zmq.CURVE_PUBLICKEY]


def test_nobody_else_can_read_the_keys(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        make_keys(tmp_path / "keys", ["b"])
    finally:
        os.umask(before)
    found = [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    assert len(found) == 11
    assert {path: mode for path in found if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077} == {}


def test_secrets_are_in_no_text_about_the_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    keys = keys_of(tmp_path / "keys")
    assert keys.client_secret.decode() not in repr(keys)
    assert (keys.server_secret or b"").decode() not in repr(keys)


def test_the_command_makes_keys_once_and_adds_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    run("keys", folder, "b")
    assert f"copy {folder}/clients/b to its machine" in capsys.readouterr().out
    server = keys_of(folder).server_public
    run("keys", folder, "c", "d")
    assert keys_of(folder / "clients" / "d").server_public == server
    with pytest.raises(
        ConfigError, match="exists already; name a client to add one, or choose another folder"
    ):
        run("keys", folder)
    with pytest.raises(
        ConfigError, match=r"has a client 'c' already; remove .*/allowed/c.pub and .*/clients/c"
    ):
        run("keys", folder, "c")
    with pytest.raises(ConfigError, match=r"client '\.\./x': a name has letters, digits"):
        run("keys", folder, "../x")
    assert keys_of(folder).server_public == server


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: folder.chmod(0o755), r"keys is open to others \(mode 0755\); run chmod 700 .*keys$"),
        (lambda folder: (folder / "server.key").chmod(0o640), r"server.key is open .* run chmod 600 .*server.key$"),
        (lambda folder: (folder / "client.key").unlink(), "cannot read the key .*client.key: No such file"),
        (lambda folder: (folder / "server.pub").write_text("x" * 40 + "y"), "server.pub does not hold a key"),
        (lambda folder: (folder / "server.pub").write_text("#" * 40), "server.pub does not hold a key"),
        (lambda folder: (folder / "server.pub").write_text("~" * 40), "server.pub does not hold a key"),
        (lambda folder: (folder / "server.pub").write_text(""), "server.pub does not hold a key"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, spoil: object, message: str) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        load_keys(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert load_keys(None) is None
    with pytest.raises(ConfigError, match=r"there is no folder of keys .*; `agentgym keys .*` makes one"):
        load_keys(tmp_path / "nowhere")


def test_keys_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write keys into .*file/keys"):
        make_keys(tmp_path / "file" / "keys")
