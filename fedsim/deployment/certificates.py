"""TLS certificates of a SuperLink (Flower's relay between server and clients), and keys by which it recognises its clients."""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.recording.files import make_private, write_bytes

DEFAULT_HOST_NAMES = ("superlink", "localhost", "127.0.0.1", "::1")
"""Names in every SuperLink's certificate: the name of its container, and names by which its own machine reaches it."""
HOST_NAME = re.compile(r"(?=.{1,253}\Z)(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
"""Names of at most 253 characters, with labels of at most 63 of them; the first label may be a wildcard."""
MAX_VALID_DAYS = 825
"""Longest validity in days of a server's certificate that all systems accept."""


@dataclass(frozen=True)
class ServerFiles:
    """Paths of the TLS files of the SuperLink (Flower's relay between server and clients) and of the server, below `root`.

    authority:     certificate of the authority, which all parties trust.
    authority_key: private key of the authority, needed only to sign certificates; move it to a safe place once the SuperLink's
                   certificate is signed.
    certificate:   certificate of the SuperLink.
    key:           private key of the SuperLink.
    secret:        file with a secret shared by SuperLink and server; the SuperLink gives tasks only to processes that know it.
    """

    root: Path

    @property
    def authority(self) -> Path:
        return self.root / "trust" / "ca.crt"

    @property
    def authority_key(self) -> Path:
        return self.root / "authority" / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.root / "superlink" / "server.pem"

    @property
    def key(self) -> Path:
        return self.root / "superlink" / "server.key"

    @property
    def secret(self) -> Path:
        return self.root / "secret" / "superexec"


def make_server(root: Path, hosts: Sequence[str] = (), *, days: int = 365) -> ServerFiles:
    """Create a certificate authority, a certificate for a SuperLink, and a secret below `root`; return their paths.

    hosts: names or addresses for which the SuperLink's certificate is valid, besides `DEFAULT_HOST_NAMES`.
    days:  validity in days of the certificates that are created. The SuperLink's certificate expires no later than the
           authority's.

    Existing certificates, with their keys, and an existing secret are kept. Delete `server.pem` to make a certificate for other
    hosts.
    Raises ValueError if `days` is not between 1 and 825, if one of `hosts` is neither a host name nor an address, if the
    SuperLink's certificate must be signed and the authority's key is missing, or if the authority's certificate is
    missing, but the authority's key or the SuperLink's certificate is there.
    """
    if not 0 < days <= MAX_VALID_DAYS:
        raise ValueError(f"days must be between 1 and {MAX_VALID_DAYS}, got {days}")
    names = [_parse_host(host) for host in dict.fromkeys((*hosts, *DEFAULT_HOST_NAMES))]
    made = ServerFiles(make_private(root))
    for path in (made.authority, made.authority_key, made.certificate, made.secret):
        make_private(path.parent)
    until = datetime.now(UTC) + timedelta(days=days)
    if not made.authority.exists():
        if left := [str(path) for path in (made.authority_key, made.certificate) if path.exists()]:
            raise ValueError(
                f"{made.authority} is missing, and a new authority would not fit to {' and '.join(left)}; restore it from a "
                f"client's machine, or delete {' and '.join(left)} to make a new authority, whose certificate must be copied to "
                "all machines"
            )
        key = ec.generate_private_key(ec.SECP384R1())
        write_bytes(made.authority_key, _to_pem(key))
        write_bytes(made.authority, _make_authority(key, until).public_bytes(Encoding.PEM))
    if not made.certificate.exists():
        if not made.authority_key.exists():
            raise ValueError(
                f"{made.authority_key} is needed to sign {made.certificate} but is missing; restore it, or delete "
                f"{made.authority} to make a new authority, whose certificate must be copied to all machines"
            )
        signer = load_pem_private_key(made.authority_key.read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
        key = ec.generate_private_key(ec.SECP384R1())
        write_bytes(made.key, _to_pem(key))
        signed = _make_certificate(key, signer, authority, names, until)
        write_bytes(made.certificate, signed.public_bytes(Encoding.PEM))
    if not made.secret.exists():
        write_bytes(made.secret, secrets.token_hex(32).encode())
    return made


def make_client(key: Path, public: Path) -> None:
    """Write a client's private key to `key`, and its public key, which the SuperLink gets, to `public`.

    An existing private key is kept, and the public key is computed from it. Raises ValueError if an existing private key is not
    in OpenSSH's format, has a password, or is not of an elliptic curve for ECDSA, the only kind that Flower accepts.

    New keys are on the curve P-384, like those made by `ssh-keygen -t ecdsa -b 384 -N ""`.
    """
    make_private(key.parent)
    make_private(public.parent)
    if not key.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        write_bytes(key, made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    try:
        kept = load_ssh_private_key(key.read_bytes(), password=None)
    except TypeError as error:
        raise ValueError(
            f"{key} has a password, which Flower cannot ask for; remove it with: ssh-keygen -p -N '' -f {key}"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"{key} cannot be read as a private key in OpenSSH's format ({error}); move it away to create a new one"
        ) from error
    if not isinstance(kept, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key} is not an ECDSA key, the only kind that Flower accepts; move it away to create a new one")
    write_bytes(public, kept.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _make_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _make_authority(key: ec.EllipticCurvePrivateKey, until: datetime) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    name = _make_name("fedleak federation")
    built = _begin_certificate(name, name, key, until).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return built.add_extension(usage, critical=True).add_extension(identifier, critical=False).sign(key, hashes.SHA384())


def _make_certificate(
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    names: Sequence[x509.GeneralName],
    until: datetime,
) -> x509.Certificate:
    subject = _make_name("fedleak SuperLink")  # clients compare the alternative names alone
    built = _begin_certificate(subject, authority.subject, key, min(until, authority.not_valid_after_utc))
    return (
        built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(minutes=5)  # allows for differences between clocks
    built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return built.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(until)


def _parse_host(host: str) -> x509.GeneralName:
    """Return a host name or an address for a certificate. Raises ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST_NAME.fullmatch(host):
            raise ValueError(
                f"{host!r} is neither a host name nor an address of the SuperLink: write it as superlink.example.org or "
                "192.0.2.10, without a port"
            ) from None
        return x509.DNSName(host)
