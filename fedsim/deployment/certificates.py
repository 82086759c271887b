"""Certificates for TLS, and keys by which a SuperLink knows its clients."""

import ipaddress
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.recording.files import make_private, write_bytes

ALWAYS = ("superlink", "localhost", "127.0.0.1", "::1")
"""Names of every SuperLink: that of its container, and those of its own machine."""
MOST_DAYS = 825
"""Longer than that, some systems take no certificate of a server."""


@dataclass(frozen=True)
class ServerFiles:
    """The files of the server's side below `root`, each where only those find it who may.

    authority:     the certificate that everybody trusts. authority_key: signs; best kept elsewhere afterwards.
    certificate, key: the SuperLink's. secret: of SuperLink and server, who hands out tasks only to who knows it.
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
    """Make an authority, a certificate for a SuperLink under the names or addresses `hosts` and `ALWAYS`, and a secret.

    What is there already is kept, so more can be made later: delete `server.pem` for other hosts. days: for which it holds.
    Raises ValueError for more than 825 days, or where the authority's key is gone and something is to be signed.
    """
    if not 0 < days <= MOST_DAYS:
        raise ValueError(f"days must be between 1 and {MOST_DAYS}, got {days}")
    made = ServerFiles(make_private(root))
    for path in (made.authority, made.authority_key, made.certificate, made.secret):
        make_private(path.parent)
    until = datetime.now(UTC) + timedelta(days=days)
    if not made.authority.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        write_bytes(made.authority_key, _pem(key))
        write_bytes(made.authority, _authority(key, until).public_bytes(Encoding.PEM))
    if not made.certificate.exists():
        if not made.authority_key.exists():
            raise ValueError(
                f"{made.authority_key} is needed to sign {made.certificate}; bring it back, or delete {made.authority}"
            )
        signer = load_pem_private_key(made.authority_key.read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
        key = ec.generate_private_key(ec.SECP384R1())
        write_bytes(made.key, _pem(key))
        signed = _certificate(key, signer, authority, (*hosts, *ALWAYS), until)
        write_bytes(made.certificate, signed.public_bytes(Encoding.PEM))
    _once(made.secret, lambda: secrets.token_hex(32).encode())
    return made


def make_client(key: Path, public: Path) -> None:
    """Make a client's key, and the public half that the SuperLink is told; what is there already is kept.

    In OpenSSH's format over the curve P-384, as `ssh-keygen -t ecdsa -b 384 -N ""` writes them: Flower takes no other.
    """
    make_private(key.parent)
    make_private(public.parent)
    if key.exists() and public.exists():
        return
    pair = ec.generate_private_key(ec.SECP384R1())
    write_bytes(key, pair.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_bytes(public, pair.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _once(path: Path, content: Callable[[], bytes]) -> None:
    if not path.exists():
        write_bytes(path, content())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _authority(key: ec.EllipticCurvePrivateKey, until: datetime) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    name = _name("fedleak federation")
    built = _begun(name, name, key, until).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return built.add_extension(usage, critical=True).add_extension(identifier, critical=False).sign(key, hashes.SHA384())


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    hosts: Sequence[str],
    until: datetime,
) -> x509.Certificate:
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
    built = _begun(_name(hosts[0]), authority.subject, key, min(until, authority.not_valid_after_utc))
    return (
        built.add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return built.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(until)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
