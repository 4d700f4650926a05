"""A cache that grows in place: reserve addresses, commit a few blocks, warm up, extend, sleep and wake.

python examples/01_grow_a_cache.py
"""

from kvx.cache import ExtensibleKVCache
from kvx.drivers.host import HostDriver
from kvx.layout import KVCacheLayout
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import views_of

MIB = 1 << 20

driver = HostDriver()
spec = KVCacheSpec.full_attention(block_size_tokens=16, num_kv_heads=4, head_size=64, dtype="bfloat16")
layers = tuple(f"layer.{index}" for index in range(8))
geometry = CacheGeometry(
    KVCacheLayout.LBHNC,
    (LayerGroup("full", layers, spec),),
    capacity_blocks=8192,
    granularity_bytes=driver.granularity_bytes,
)

cache = ExtensibleKVCache(driver, geometry.segment_table)
cache.open()
print(f"reserved {cache.reserved_bytes / MIB:,.0f} MiB of addresses, {cache.committed_bytes / MIB:,.0f} MiB of memory")

cache.commit(64)
views = views_of(cache.buffer, geometry)
cache.set_views(views.values())
before = views["layer.3"].data_ptr()
views["layer.3"][0] = 1.0  # warm-up works on the real views, at the real addresses
print(f"warmed up with {cache.committed_blocks} blocks, {cache.committed_bytes / MIB:,.0f} MiB")

cache.extend_kv_cache(2048)  # after measuring what is free
assert views["layer.3"].data_ptr() == before
views["layer.3"][2047] = 2.0
print(f"grown to {cache.final_blocks} blocks, {cache.committed_bytes / MIB:,.0f} MiB, at the same address")
print(f"a connector may register {len(cache.regions())} regions, all of them committed")

cache.sleep()
print(f"asleep: {cache.committed_bytes / MIB:,.0f} MiB")
cache.wake()
print(f"awake: {cache.committed_bytes / MIB:,.0f} MiB, generation {cache.generation}")
cache.close()
