"""Tests of certificates and keys: TLS accepts them, Flower and OpenSSH read them, and only their owner can."""

import ssl
import stat
import subprocess
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedsim.deployment.certificates import make_client, make_server
from fedsim.deployment.health import is_healthy


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


def served(root: Path) -> HTTPServer:
    made = make_server(root)
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_tls_accepts_a_certificate_of_this_authority_and_of_no_other(tmp_path: Path) -> None:
    server = served(tmp_path / "a")
    try:
        port = server.server_address[1]
        mine, others = (str(make_server(tmp_path / name).authority) for name in "ab")
        for host in ("127.0.0.1", "localhost"):
            assert is_healthy(f"{host}:{port}", mine)
            assert not is_healthy(f"{host}:{port}", others)
        assert not is_healthy(f"127.0.0.1:{port}/elsewhere", mine)
        assert not is_healthy(f"127.0.0.1:{port}", None)
    finally:
        server.shutdown()
        server.server_close()


def test_a_certificate_names_the_given_hosts_and_is_valid_for_the_given_days(tmp_path: Path) -> None:
    made = make_server(tmp_path, ["link.example.org", "10.77.0.1"], days=30)
    certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example.org", "superlink", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.77.0.1", "127.0.0.1", "::1"]
    assert 29 < (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400 <= 30
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(made.authority.read_bytes()))


def test_long_host_names_are_certified_and_what_is_no_host_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    name = f"{'a' * 60}.{'b' * 60}.example.org"
    certificate = x509.load_pem_x509_certificate(make_server(tmp_path / "long", [name]).certificate.read_bytes())
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert name in alternatives.get_values_for_type(x509.DNSName)
    for wrong in ("", "bad host", "192.0.2.10:8000", "https://link.example.org", "10.0.0.0/24", "a..b", "x" * 64):
        with pytest.raises(ValueError, match=r"neither a host name nor an address .* without a port"):
            make_server(tmp_path / "wrong", [wrong])
    assert not (tmp_path / "wrong").exists()


def test_existing_files_are_kept_and_a_new_certificate_has_the_same_authority(tmp_path: Path) -> None:
    made = make_server(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_server(tmp_path, ["other.example.org"]) == made
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    made.certificate.unlink()
    make_server(tmp_path, ["other.example.org"])
    authority = x509.load_pem_x509_certificate(before[made.authority])
    x509.load_pem_x509_certificate(made.certificate.read_bytes()).verify_directly_issued_by(authority)
    made.certificate.unlink()
    made.authority_key.unlink()
    with pytest.raises(ValueError, match=r"ca\.key is needed to sign"):
        make_server(tmp_path)
    with pytest.raises(ValueError, match="between 1 and 825, got 900"):
        make_server(tmp_path / "long", days=900)


@pytest.mark.parametrize("moved", ["authority_key", "certificate", ""])
def test_a_new_authority_does_not_replace_one_that_lacks_its_certificate(moved: str, tmp_path: Path) -> None:
    made = make_server(tmp_path)
    for name in filter(None, ("authority", moved)):
        getattr(made, name).unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"ca\.crt is missing, and a new authority would not fit to .*; restore it .* or delete"):
        make_server(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_secrets_are_closed_to_other_users_and_lie_in_separate_folders(tmp_path: Path) -> None:
    made = make_server(tmp_path)
    make_client(tmp_path / "clients/0/key", tmp_path / "keys/0.pub")
    for path in (made.authority_key, made.key, made.secret, tmp_path / "clients/0/key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len({path.parent for path in (made.authority, made.authority_key, made.certificate, made.secret)}) == 4
    assert make_server(tmp_path / "other").secret.read_bytes() != made.secret.read_bytes()


def test_a_clients_key_is_of_the_kind_that_flower_requires(tmp_path: Path) -> None:
    key, public = tmp_path / "key", tmp_path / "keys" / "0.pub"
    make_client(key, public)
    before = key.read_bytes(), public.read_bytes()
    make_client(key, public)
    assert (key.read_bytes(), public.read_bytes()) == before
    private, loaded = load_ssh_private_key(before[0], None), load_ssh_public_key(before[1])
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(loaded, ec.EllipticCurvePublicKey)
    assert isinstance(loaded.curve, ec.SECP384R1)
    assert private.public_key() == loaded


def test_a_client_keeps_its_private_key_if_the_public_one_is_lost(tmp_path: Path) -> None:
    """A new key would make it another client for the SuperLink and in the recording."""
    key, public = tmp_path / "key", tmp_path / "key.pub"
    make_client(key, public)
    before = key.read_bytes(), public.read_bytes()
    public.unlink()
    make_client(key, public)
    assert (key.read_bytes(), public.read_bytes()) == before
    key.write_text("no key")
    with pytest.raises(ValueError, match="cannot be read as a private key in OpenSSH's format"):
        make_client(key, public)


def test_a_key_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "other").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    with pytest.raises(ValueError, match=r"other is not an ECDSA key, .*; move it away to create a new one"):
        make_client(tmp_path / "other", tmp_path / "key.pub")
    assert not (tmp_path / "key.pub").exists()


def test_a_key_with_a_password_is_refused_by_name(tmp_path: Path) -> None:
    key = tmp_path / "key"
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "password", "-f", key], check=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    with pytest.raises(ValueError, match=r"key has a password, .*; remove it with: ssh-keygen -p"):
        make_client(key, tmp_path / "public")
    assert not (tmp_path / "public").exists()


def test_openssh_reads_a_clients_key(tmp_path: Path) -> None:
    make_client(tmp_path / "key", tmp_path / "key.pub")
    try:
        done = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert done.stdout.split() == (tmp_path / "key.pub").read_text().split()
