"""The shape language of signatures, in the slow path that explains and in the fast one that only compares."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvbackend.arrays import Array, Arrays, need, one_of
from kvbackend.errors import ArgumentError
from kvbackend.facts import key_source

FLOAT = (torch.float32,)


class FakeOp:
    """As much of an op as key_source reads."""

    def __init__(self, **dims: str) -> None:
        self.arrays = Arrays(
            Array(name.rstrip("_"), FLOAT, tuple(d.split()), name.endswith("_")) for name, d in dims.items()
        )

    def slow(self, **shapes: tuple[int, ...] | None) -> bool:
        args = {name: None if shape is None else torch.zeros(shape) for name, shape in shapes.items()}
        try:
            self.arrays.check(args)
        except ArgumentError:
            return False
        return True

    def fast(self, **shapes: tuple[int, ...] | None) -> bool:
        lines = key_source(self, {}, ())  # type: ignore[arg-type]
        space = {name: None if shape is None else torch.zeros(shape) for name, shape in shapes.items()}
        try:
            exec("\n".join(lines), space)
        except ValueError:
            return False
        return True


@pytest.mark.parametrize(
    ("dims", "good", "bad"),
    [
        (dict(a="T D", b="T"), dict(a=(2, 3), b=(2,)), [dict(a=(2, 3), b=(3,)), dict(a=(2,), b=(2,))]),
        (dict(a="B", b="B+1"), dict(a=(2,), b=(3,)), [dict(a=(2,), b=(2,))]),
        (dict(a="H", b="1|H"), dict(a=(4,), b=(4,)), [dict(a=(4,), b=(2,))]),
        (dict(a="H", b="1|H"), dict(a=(4,), b=(1,)), [dict(a=(4,), b=(0,))]),
        (dict(a="T", b="<=T"), dict(a=(4,), b=(2,)), [dict(a=(4,), b=(5,))]),
        (dict(a="T 2"), dict(a=(4, 2)), [dict(a=(4, 3))]),
        (dict(a="n *page", b="m *page"), dict(a=(4, 2, 3), b=(5, 2, 3)),
         [dict(a=(4, 2, 3), b=(5, 2)), dict(a=(4, 2), b=(5, 3))]),
        (dict(a="n *page", b="*page"), dict(a=(4,), b=()), [dict(a=(4,), b=(1,))]),
        (dict(a="T", b_="T", c_="nb", d_="nb"), dict(a=(1,), b=None, c=(2,), d=(2,)),
         [dict(a=(1,), b=None, c=(2,), d=(3,))]),
        (dict(a="T", b_="nb", c_="nb"), dict(a=(1,), b=None, c=(9,)), [dict(a=(1,), b=(2,), c=(9,))]),
        (dict(b_="T", a="T"), dict(b=(3,), a=(3,)), [dict(b=(3,), a=(4,))]),
    ],
)  # fmt: skip
def test_both_paths_agree(dims, good, bad) -> None:
    op = FakeOp(**dims)
    assert op.slow(**good)
    assert op.fast(**good)
    for shapes in bad:
        assert not op.slow(**shapes), shapes
        assert not op.fast(**shapes), shapes


def test_both_paths_agree_on_everything_small() -> None:
    op = FakeOp(q="T H D", cache="nb bs Hk D", scale_="1|Hk", slots="<=T")
    sizes = list(itertools.product((1, 2), (2,), (1, 2), (1,), (2,), (2, 3), (1, 2), (None, 1, 2, 3), (0, 1, 2, 3)))
    seen = set()
    for tokens, heads, dim, blocks, block, kv, cache_dim, scale, slots in sizes:
        shapes = dict(
            q=(tokens, heads, dim), cache=(blocks, block, kv, cache_dim), scale=None if scale is None else (scale,),
            slots=(slots,),
        )  # fmt: skip
        assert op.slow(**shapes) == op.fast(**shapes), shapes
        seen.add(op.slow(**shapes))
    assert seen == {True, False}


def test_messages_name_what_was_got_and_what_is_allowed() -> None:
    arrays = FakeOp(q="T H D", cache="nb bs D").arrays
    for args, message in [
        (
            dict(q=torch.zeros(2, 3), cache=torch.zeros(1, 1, 4)),
            r"q has 2 dims, shape \[2, 3\]; it must be \[T, H, D\]: ",
        ),
        (
            dict(q=torch.zeros(2, 3, 4), cache=torch.zeros(1, 1, 5)),
            r"cache \[nb, bs, D\] has D = 5; it must be 4, the D of q: ",
        ),
        (
            dict(q=torch.zeros(2, 3, 4).half(), cache=torch.zeros(1, 1, 4)),
            "q is torch.float16; it must be torch.float32: ",
        ),
        (dict(q=torch.zeros(2, 3, 4), cache=torch.zeros(1, 1, 4, device="meta")), "cache is on meta but q is on cpu; "),
    ]:
        with pytest.raises(ArgumentError, match=message):
            arrays.check(args)


def test_need_and_one_of() -> None:
    need(True, "never")
    with pytest.raises(ArgumentError, match="told"):
        need(False, "told")
    assert one_of(["a"]) == "a"
    assert one_of("abc") == "a, b or c"
    assert one_of([]) == "nothing"
