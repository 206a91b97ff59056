"""Certificates made on the fly, as an operator's authority would make them."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Files:
    ca: Path
    cert: Path
    key: Path

    def tls(self) -> dict[str, str]:
        """Of `rpc.tls`."""
        return {"ca_file": str(self.ca), "cert_file": str(self.cert), "key_file": str(self.key)}

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key, certificate: the order of gRPC's arguments."""
        return self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key.public_key(), DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def member(
        self, role: str, cluster: str = "default", name: str = "", file: str = "", **options: Any
    ) -> Files:
        """For a process of a cluster; on 127.0.0.1 for its clients."""
        uri = f"spiffe://headrace/{cluster}/{role}" + (f"/{name}" if name else "")
        dns = f"{role}.{cluster}.headrace.internal"
        return self.issue(file or f"{role}{name}", uris=[uri], names=[dns], **options)

    def issue(
        self,
        file: str,
        *,
        uris: Sequence[str] = (),
        names: Sequence[str] = (),
        addresses: Sequence[str] = ("127.0.0.1",),
        valid_for: datetime.timedelta = DAY,
    ) -> Files:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        alternatives = [
            *map(x509.UniformResourceIdentifier, uris),
            *map(x509.DNSName, names),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        ]
        builder = self._builder(subject, key.public_key(), valid_for)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        files = Files(self.ca, self._folder / f"{file}.crt", self._folder / f"{file}.key")
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        replace(files.key, private)
        replace(
            files.cert,
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        )
        return files

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + valid_for)
        )


def replace(path: Path, data: bytes) -> None:
    """As tools that renew certificates do: the file is whole at any time."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)
