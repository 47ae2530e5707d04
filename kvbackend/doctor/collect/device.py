"""Facts of torch and kvbackend at work, in children: imports, the table op x backend, one round trip per card."""

import os
import re

from kvbackend.doctor import facts
from kvbackend.doctor.collect import extension, imports, python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host

_START = """
sys.path.insert(0, @FOLDER@)
try:
"""
_OPS = (
    _START
    + """
    import torch
    from kvbackend import backends, native, ops
    from kvbackend.facts import views
    libraries = {}
    for path in sorted(native.FOLDER.glob("libkvbackend_*.so")):
        device = path.stem.partition("_")[2]
        loaded = native.library(device)
        libraries[device] = {"reason": loaded.reason, "ops": sorted(loaded.schemas)}
    table = []
    for op in ops.registry.values():
        samples = [s for dtype in (torch.bfloat16, torch.float32) for _, s in op.make_samples("meta", dtype)]
        for backend in backends.registered().values():
            best = None
            for sample in samples:
                reasons = list(op.dispatcher.reasons(backend, views(op, op.bind((), sample), {})))
                if best is None or len(reasons) < len(best):
                    best = reasons
                if not reasons:
                    break
            status = "refused" if best is None or best else "runs" if backend.device == "cpu" else "unproven"
            if backend.adapter(op.name) is None:
                status, best = "absent", []
            table.append({"op": op.name, "backend": backend.name, "device": backend.device, "status": status,
                          "reasons": best if best is not None else ["has no samples to ask with"]})
    answer(ok=True, libraries=libraries, table=table)
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
"""
)
# Three sequences over shuffled pages of eight tokens: rows are written through slots, attended to, and read back.
_ROUND_TRIP = (
    _START
    + """
    import torch
    kind, index = sys.argv[2], int(sys.argv[3])
    if kind == "npu":
        import torch_npu
    module = getattr(torch, kind)
    if kind != "cpu" and index >= module.device_count():
        answer(ok=True, skipped="not among the %d visible cards" % module.device_count())
        raise SystemExit
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    from kvbackend import explain, ops
    torch.manual_seed(7)
    heads, kv_heads, dim, page = 4, 2, 64, 8
    lens = [5, 8, 19]
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    table = torch.randperm(12)[:9].reshape(3, 3).to(torch.int32)
    rows = [torch.randn(sum(lens), kv_heads, dim).to(dtype) for _ in range(2)]
    places = [(table[s].long(), torch.arange(n)) for s, n in enumerate(lens)]
    slots = torch.cat([pages[at // page] * page + at % page for pages, at in places])
    caches = [torch.full((12, page, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    write = dict(key=rows[0].to(device), value=rows[1].to(device), key_cache=caches[0], value_cache=caches[1],
                 slot_mapping=slots.to(device))
    backends = {"reshape_and_cache": explain("reshape_and_cache", **write).chosen}
    with torch.no_grad():
        ops.reshape_and_cache(**write)
        back = [c.cpu().flatten(0, 1)[slots] for c in caches]
        read_ok = all(torch.equal(b, r) for b, r in zip(back, rows))
        error = None
        if "paged_attention" in ops.registry:
            q = torch.randn(3, heads, dim).to(dtype)
            call = dict(q=q.to(device), key_cache=caches[0], value_cache=caches[1], block_table=table.to(device),
                        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
                        cu_seqlens_q=torch.arange(4, dtype=torch.int32, device=device), max_seqlen_q=1,
                        softmax_scale=0.125)
            backends["paged_attention"] = explain("paged_attention", **call).chosen
            out = ops.paged_attention(**call)
            out = (out[0] if isinstance(out, (tuple, list)) else out).cpu().double()
            start, error = 0, 0.0
            for s, n in enumerate(lens):
                k, v = (r[start:start + n].double().repeat_interleave(heads // kv_heads, 1) for r in rows)
                weights = (torch.einsum("hd,nhd->hn", q[s].double(), k) * 0.125).softmax(-1)
                error = max(error, float((out[s] - torch.einsum("hn,nhd->hd", weights, v)).abs().max()))
                start += n
    answer(ok=True, read_ok=read_ok, error=error, bound=1e-4 if kind == "cpu" else 2e-2, backends=backends,
           name=getattr(module, "get_device_name", lambda i: kind)(index))
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
"""
)


def _code(host: Host, text: str) -> str:
    return text.replace("@FOLDER@", repr(os.path.dirname(extension.package(host))))


def torch_and_ops(host: Host, timeout: float) -> Facts:
    """One clean child: import torch, then load our libraries and ask every backend about every op, on metadata."""
    if not python.package_folder(host, "torch"):
        return {
            "torch.import": facts.absent("site-packages"),
            "ops.table": facts.absent("torch is not installed"),
        }
    output = imports.child(host, imports.TORCH + _code(host, _OPS), timeout, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    found = imports.torch_facts(output)
    if not found["torch.import"].get("value", {}).get("ok"):
        return {**found, "ops.table": facts.absent("torch does not import")}
    fact = imports.outcome(output, "kvbackend in a child", 1)
    answer = fact.get("value", {})
    if not answer.get("ok"):
        error = fact.get("error") or answer.get("error", "")
        state = "timeout" if fact["state"] == "timeout" else "unparsed"
        return {**found, "ops.table": facts.failed(state, "kvbackend in a child", error, fact.get("raw", ""))}
    return {
        **found,
        "ops.table": facts.maybe(answer.get("table"), "kvbackend in a child"),
        "ext.loaded": facts.maybe(answer.get("libraries"), "kvbackend in a child"),
    }


def round_trip(host: Host, timeout: float) -> Facts:
    """One tiny write, attention and read-back on every card, each in its own child; without cards, on the CPU."""
    names = host.list("/dev")
    cards = [("npu", n) for n in range(sum(1 for n in names if re.fullmatch(r"v?davinci\d+", n)))]
    cards += [("cuda", n) for n in range(sum(1 for n in names if re.fullmatch(r"nvidia\d+", n)))]
    found: Facts = {}
    for kind, index in cards or [("cpu", 0)]:
        argv_code = _code(host, _ROUND_TRIP).replace("sys.argv[2]", repr(kind)).replace("sys.argv[3]", repr(index))
        output = imports.child(host, argv_code, timeout, clean=False)
        name = kind if kind == "cpu" else f"{kind}{index}"
        found["proof." + name] = imports.outcome(output, f"round trip on {name}")
    return found
