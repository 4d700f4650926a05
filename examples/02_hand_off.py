"""One request's blocks from a prefill engine to a decode engine, each a process of its own, without a model.

python examples/02_hand_off.py [CONNECTOR]      # nixl, mooncake or ipc; by default ipc
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny_process import Remote

TOKENS, BLOCK_TOKENS, LAYERS = 100, 16, 4


class Engine:
    """A cache, a connector, and the hand-off over both."""

    def __init__(self, name: str, connector: str) -> None:
        from kvx.cache import ExtensibleKVCache
        from kvx.drivers.shared_host import SharedHostDriver
        from kvx.handoff import CacheFollower, EngineInfo, HandoffSettings, HandoffWorker
        from kvx.layout import KVCacheLayout
        from kvx.plan import group_geometry
        from kvx.registry import connector_classes
        from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
        from kvx.tensor import views_of

        driver = SharedHostDriver()  # memory that another process can map, as ipc needs it
        spec = KVCacheSpec.full_attention(block_size_tokens=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype="float32")
        layers = tuple(f"layer.{index}" for index in range(LAYERS))
        geometry = CacheGeometry(
            KVCacheLayout.LBHNC, (LayerGroup("full", layers, spec),), 4096, driver.granularity_bytes
        )
        self.cache = ExtensibleKVCache(driver, geometry.segment_table)
        self.cache.open()
        self.views = views_of(self.cache.buffer, geometry)
        self.cache.set_views(self.views.values())
        self.cache.commit(16)
        self.connectors = [found() for found in connector_classes([connector])]
        for one in self.connectors:
            self.cache.attach(one)
        self.cache.extend_kv_cache(512)  # and now the connectors are open
        info = EngineInfo(engine_id=name, model="none", dtype="float32", kv_cache_dtype="float32")
        self.worker = HandoffWorker(HandoffSettings(connectors=(connector,), verify="all"), info, self.connectors)
        groups = (group_geometry(geometry, 0),)
        self.worker.open(groups, self.views, self.cache.final_blocks, self.cache.generation, "LBHNC")
        self.cache.attach(CacheFollower(self.worker, lambda: self.cache.committed_blocks))

    def prefill(self, request_id: str, blocks: list[int]) -> int:
        """Compute a prompt (here: make numbers up) and hold its blocks. Returns where the side channel listens."""
        for index, view in enumerate(self.views.values()):
            for position, block in enumerate(blocks):
                view[block] = float(1000 * index + position)
        self.worker.hold(request_id, [blocks], TOKENS)
        return self.worker.port

    def decode(self, request_id: str, blocks: list[int], port: int) -> dict[str, Any]:
        """Pull the request's blocks into ours, and look at what has come."""
        from kvx.handoff import Pull

        self.worker.pull(
            Pull(
                request_id=f"{request_id}-decode", remote_request_id=request_id, remote_engine_id="prefill",
                host="127.0.0.1", port=port, blocks=[blocks], first_token=0, num_tokens=TOKENS,
            )
        )  # fmt: skip
        self.worker.wait(10)
        events = self.worker.poll()
        content = torch.stack([view[block, 0, 0, 0] for view in self.views.values() for block in blocks])
        return {"received": sorted(events.received), "failed": dict(events.failed), "content": content.tolist()}

    def status(self) -> dict[str, Any]:
        return self.worker.status()

    def close(self) -> None:
        self.worker.close()
        self.cache.close()


def main() -> None:
    connector = sys.argv[1] if len(sys.argv) > 1 else "ipc"
    with Remote(Engine, "prefill", connector) as prefill, Remote(Engine, "decode", connector) as decode:
        port = prefill.call("prefill", "request-1", [5, 3, 8, 1, 9, 2, 7])
        found = decode.call("decode", "request-1", [20, 21, 22, 23, 24, 25, 26], port)
        status = decode.call("status")
    assert found["received"] == ["request-1-decode"], found
    assert found["content"] == [1000.0 * layer + position for layer in range(LAYERS) for position in range(7)]
    moved, digests = status["transfer"], status["digests"]
    print(f"{connector}: {moved['blocks']} blocks, {moved['bytes']:,} bytes in {moved['descriptors']} descriptors")
    print(f"{digests['checked']} digests compared, {digests['mismatched']} differ")


if __name__ == "__main__":
    main()
