"""Cryptography of secure aggregation with the package `cryptography`: key agreement (X25519, HKDF) and encryption of shares."""

import secrets
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Draw = Callable[[int], bytes]
"""Returns the requested number of random bytes."""

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_DOMAIN = "fedleak secure aggregation 1"
"""Domain separation: prefix of every key derivation, so that no other protocol derives the same key."""


def draw_bytes(count: int) -> bytes:
    """Return `count` random bytes from the operating system."""
    return secrets.token_bytes(count)


def derive_public(private: bytes) -> bytes:
    """Return the X25519 public key (32 bytes) of a private key of 32 random bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def check_public(public: bytes) -> None:
    """Raise ValueError if an X25519 public key is invalid or has small order, so that its shared secrets are predictable."""
    agree(bytes(KEY_BYTES), public, "check", "")


def agree(private: bytes, public: bytes, purpose: str, context: str) -> bytes:
    """Return the 32-byte key shared by the owners of two key pairs, from the private key of one and the public key of the other.

    purpose, context: texts that both owners must give alike; other texts give another key.
    Raises ValueError if the public key is invalid or has small order.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError(
            "a client's public key (X25519) is invalid or has small order, so that secrets shared with it would be predictable; "
            "check the client that sent it"
        ) from None
    return _derive_key(shared, purpose, context)


def _derive_key(secret: bytes, purpose: str, context: str) -> bytes:
    info = f"{KEY_DOMAIN}/{purpose}/{context}".encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def seal(key: bytes, text: bytes, about: str, draw: Draw) -> bytes:
    """Return a 12-byte nonce followed by `text` in encrypted form (ChaCha20-Poly1305).

    key: 32 bytes. about: description of the message, which is authenticated but not part of the result; the receiver must give
    the same description to `unseal`. draw: returns random bytes for the nonce.
    """
    nonce = draw(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """Return the text that `seal` encrypted. Raises ValueError if `key`, `sealed` or `about` is not as in `seal`."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about.encode())
    except (InvalidTag, ValueError):
        raise ValueError(
            f"the message {about} cannot be decrypted, so it was changed or encrypted with another key; this client leaves the "
            "round"
        ) from None
