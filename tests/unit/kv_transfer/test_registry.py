from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kv_transfer.registry import TRANSPORTS, create_transport
from kv_transfer.transport import BlockRegion


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_transport_is_made_under_its_name(name):
    blocks = np.zeros((2, 64), np.uint8)
    transport = create_transport(name, "one", [BlockRegion(blocks.ctypes.data, 2, 64)])
    assert transport.name == name
    transport.close()


def test_nothing_heavy_is_imported_before_a_transport_is_made():
    check = (
        "import sys, kv_transfer.registry, kv_transfer.nixl_transport as nixl\n"
        "assert nixl.ucx_environment()['UCX_TCP_USER_TIMEOUT'] == '2s'\n"
        "assert not {'torch', 'nixl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
