"""Every refusal: the type of the error, and that it names the argument, what came and what to do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import softdtw_cuda
from softdtw_cuda import (
    DilateLoss,
    SoftDTW,
    distributed,
    gamma_heuristic,
    softdtw,
    softdtw_alignment,
    softdtw_barycenter,
    softdtw_barycenters,
    softdtw_cdist,
    softdtw_divergence,
    softdtw_entropy,
    softdtw_expected_cost,
    softdtw_from_cost,
    softdtw_knn,
    softdtw_pairs,
    softdtw_sharp,
)

X, Y = torch.zeros(2, 5, 3), torch.zeros(2, 4, 3)
COST = torch.zeros(2, 5, 4)


def raises(error: type[Exception], *parts: str) -> pytest.RaisesExc:
    """An error whose message holds every part."""
    return pytest.raises(error, check=lambda caught: all(part in str(caught) for part in parts))


CALLS: dict[str, Callable[..., object]] = {
    "softdtw": lambda **options: softdtw(X, Y, **options),
    "divergence": lambda **options: softdtw_divergence(X, Y, **options),
    "from_cost": lambda **options: softdtw_from_cost(COST, **options),
    "alignment": lambda **options: softdtw_alignment(X, Y, **options),
    "alignment of a cost": lambda **options: softdtw_alignment(cost=COST, **options),
    "cdist": lambda **options: softdtw_cdist(X, Y, **options),
    "module": lambda **options: SoftDTW(**options)(X, Y),
    "expected cost": lambda **options: softdtw_expected_cost(X, Y, **options),
    "sharp": lambda **options: softdtw_sharp(X, Y, **options),
    "entropy": lambda **options: softdtw_entropy(X, Y, **options),
}
EVERYWHERE = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@EVERYWHERE
@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan, math.inf, -math.inf, 0])
def test_gamma_out_of_range(call: Callable[..., object], gamma: float) -> None:
    with raises(ValueError, "gamma", str(float(gamma)), "greater than 0"):
        call(gamma=gamma)


@EVERYWHERE
@pytest.mark.parametrize("gamma", ["1", None, True, 1j, torch.tensor(True), torch.tensor(1j)])
def test_gamma_of_the_wrong_type(call: Callable[..., object], gamma: object) -> None:
    number = gamma.item() if isinstance(gamma, torch.Tensor) else gamma
    with raises(TypeError, "gamma", type(number).__name__, "gamma=1.0"):
        call(gamma=gamma)


def test_gamma_of_more_than_one_element() -> None:
    with raises(ValueError, "gamma", "(2,)", "one number for the whole batch", "gamma=1.0"):
        softdtw(X, Y, gamma=torch.ones(2))


def test_gamma_may_be_any_real_number() -> None:
    expected = softdtw(X, Y, gamma=2.0)
    for gamma in (2, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2), torch.tensor([[2.0]])):
        assert torch.equal(softdtw(X, Y, gamma=gamma), expected)


def test_a_gamma_that_is_a_tensor_gets_no_gradient() -> None:
    gamma = torch.tensor([2.0], requires_grad=True)
    module = SoftDTW(gamma=gamma)
    assert torch.equal(module(X, Y), softdtw(X, Y, gamma=2.0))
    assert "gamma=2," in repr(module)
    module.gamma = gamma  # type: ignore[assignment]  # typed as a float
    assert "gamma=2," in repr(module)
    for value in (module(X, Y), softdtw_entropy(X, Y, gamma=gamma), softdtw_cdist(X, Y, gamma=gamma)):
        assert not value.requires_grad
    assert torch.equal(softdtw_entropy(X, Y, gamma=gamma), softdtw_entropy(X, Y, gamma=2.0))


@EVERYWHERE
def test_negative_bandwidth(call: Callable[..., object]) -> None:
    with raises(ValueError, "bandwidth", "-1", "None means no band"):
        call(bandwidth=-1)


@EVERYWHERE
@pytest.mark.parametrize("bandwidth", ["3", True, 0.5, math.nan, math.inf, torch.tensor(3), [3]])
def test_bandwidth_of_the_wrong_type(call: Callable[..., object], bandwidth: object) -> None:
    with raises(TypeError, "bandwidth", "an integer or None"):
        call(bandwidth=bandwidth)


def test_bandwidth_may_be_a_whole_float() -> None:
    assert torch.equal(softdtw(X, Y, bandwidth=2.0), softdtw(X, Y, bandwidth=2))
    assert torch.equal(softdtw(X, Y, bandwidth=np.int32(2)), softdtw(X, Y, bandwidth=2))


@EVERYWHERE
def test_band_without_a_path(call: Callable[..., object]) -> None:
    with raises(ValueError, "bandwidth=0", "5 and 4", "smallest radius", "is 1"):
        call(bandwidth=0)


@pytest.mark.parametrize("fused", [True, False])
def test_band_without_a_path_names_the_sample(fused: bool) -> None:
    with raises(ValueError, "bandwidth=1", "sample 1", "5 and 2", "is 3", "3 works for the whole batch"):
        softdtw(X, Y, bandwidth=1, fused=fused, x_lengths=[4, 5], y_lengths=torch.tensor([4, 2]))
    with raises(ValueError, "sample 0", "5 and 1", "is 4"):
        softdtw_from_cost(COST, bandwidth=2, y_lengths=[1, 4])
    with raises(ValueError, "x[1], y[0]", "5 and 1", "is 4"):
        softdtw_cdist(X, Y, bandwidth=2, x_lengths=[3, 5], y_lengths=[1, 4])


@pytest.mark.parametrize("call", [softdtw, softdtw_divergence, softdtw_alignment])
class TestTensorsAlone:
    def test_not_a_tensor(self, call: Callable[..., object]) -> None:
        with raises(TypeError, "x", "torch.Tensor", "ndarray", "torch.as_tensor"):
            call(np.zeros((2, 5, 3)), Y)
        with raises(TypeError, "y", "torch.Tensor", "list", "torch.as_tensor(y)"):
            call(X, [1.0])

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_series_of_different_lengths(self, call: Callable[..., object], kind: type) -> None:
        series = kind([X[0], X[1, :2]])
        padded = "torch.nn.utils.rnn.pad_sequence(x, batch_first=True)"
        with raises(TypeError, kind.__name__, "2 series", padded, "x_lengths=[len(one) for one in x]"):
            call(series, Y)
        arrays = kind([X[0].numpy(), X[1, :2].numpy()])
        ragged = np.empty(2, dtype=object)
        ragged[:] = arrays
        for given in (arrays, ragged, kind([[1.0], [2.0, 3.0]])):
            with raises(TypeError, "pad_sequence([torch.as_tensor(one) for one in y], ", "y_lengths=[len("):
                call(X, given)


@pytest.mark.parametrize("call", [softdtw, softdtw_divergence, softdtw_alignment, softdtw_cdist])
class TestPairs:
    def test_packed_sequences(self, call: Callable[..., object]) -> None:
        packed = torch.nn.utils.rnn.pack_sequence([X[0], X[1, :2]])
        with raises(TypeError, "x is a PackedSequence", "pad_packed_sequence(x, ", "x_lengths"):
            call(packed, Y)
        with raises(TypeError, "y is a PackedSequence", "pad_packed_sequence(y, ", "y_lengths"):
            call(X, packed)

    def test_time_last(self, call: Callable[..., object]) -> None:
        x, y = torch.zeros(8, 3, 50), torch.zeros(8, 3, 60)
        with raises(ValueError, "(8, 3, 50) and (8, 3, 60)", "x.transpose(1, 2) and y.transpose(1, 2)"):
            call(x, y)
        call(x.transpose(1, 2), y.transpose(1, 2))

    def test_wrong_rank(self, call: Callable[..., object]) -> None:
        for x, y in ((X[0], Y), (X, Y[0]), (X[0, :, 0], Y[0, :, 0])):
            with raises(ValueError, "3 dimensions", str(tuple(x.shape)), str(tuple(y.shape)), "x[None]"):
                call(x, y)
        with raises(ValueError, "3 dimensions", "(1, 2, 5, 3) and (1, 2, 4, 3)", "x.flatten(0, 1)") as caught:
            call(X.unsqueeze(0), Y.unsqueeze(0))
        assert "None]" not in str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64])
    def test_not_a_float(self, call: Callable[..., object], dtype: torch.dtype) -> None:
        with raises(TypeError, "x has dtype", str(dtype), "float32", "x.float()"):
            call(X.to(dtype), Y.to(dtype))
        with raises(TypeError, "y has dtype", str(dtype), "y.float()"):
            call(X, Y.to(dtype))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_not_dense(self, call: Callable[..., object]) -> None:
        with raises(TypeError, "x has layout torch.sparse_coo", "dense", "x.to_dense()"):
            call(X.to_sparse(), Y)
        with raises(TypeError, "y is a nested tensor", "dense", "y.to_padded_tensor(0.0)", "lengths"):
            call(X, torch.nested.nested_tensor([Y[0], Y[1, :2]]))

    def test_features_differ(self, call: Callable[..., object]) -> None:
        with raises(ValueError, "3 features", "has 2", "(2, 5, 3)", "(2, 4, 2)"):
            call(X, Y[..., :2])

    def test_dtypes_differ(self, call: Callable[..., object]) -> None:
        with raises(TypeError, "torch.float32", "torch.float64", "y.to(x.dtype)"):
            call(X, Y.double())

    def test_devices_differ(self, call: Callable[..., object]) -> None:
        for x, y in ((X, Y.to("meta")), (X.to("meta"), Y)):
            with raises(ValueError, f"x is on {x.device}", f"y on {y.device}", "no numbers") as caught:
                call(x, y)
            assert ".to(" not in str(caught.value)  # torch refuses to move a meta tensor

    @pytest.mark.gpu
    def test_devices_differ_on_a_gpu(self, call: Callable[..., object]) -> None:
        with raises(ValueError, "x is on cpu", "y on cuda:0", "y.to(x.device)"):
            call(X, Y.cuda())

    @pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")  # torch's own
    def test_traced(self, call: Callable[..., object]) -> None:
        with raises(RuntimeError, "torch.jit.trace", "torch.compile", "torch.export"):
            torch.jit.trace(lambda x, y: call(x, y), (X, Y))

    def test_nothing_to_compare(self, call: Callable[..., object]) -> None:
        with raises(ValueError, "x has shape (2, 0, 3)", "at least one time step"):
            call(X[:, :0], Y)
        with raises(ValueError, "y has shape (2, 0, 3)", "at least one time step"):
            call(X, Y[:, :0])
        with raises(ValueError, "x has shape (2, 5, 0)", "one feature"):
            call(X[..., :0], Y[..., :0])


def test_batch_sizes_differ() -> None:
    with raises(ValueError, "batch size 3", "2", "equal batch sizes", "softdtw_cdist"):
        softdtw(torch.zeros(3, 5, 3), Y)


@pytest.mark.parametrize("call", [softdtw, softdtw_divergence, softdtw_alignment])
def test_unbatched_shapes_are_those_that_came(call: Callable[..., object]) -> None:
    with raises(ValueError, "(8, 50) and (8, 60)", "x.unsqueeze(-1) and y.unsqueeze(-1)", "x.T") as caught:
        call(torch.zeros(8, 50), torch.zeros(8, 60))
    assert "(1, 8" not in str(caught.value)
    with raises(ValueError, "(7, 50) and (8, 60)", "the last dimension"):
        call(torch.zeros(7, 50), torch.zeros(8, 60))
    with raises(ValueError, "y has shape (0, 3)"):
        call(X[0], Y[0, :0])


def test_meta_tensors_give_shapes() -> None:
    x = X.to("meta").requires_grad_()
    y = Y.to("meta")
    for value in (softdtw(x, y), softdtw(x, y, fused=False, normalize=True), SoftDTW()(x, y)):
        assert value.shape == (2,)
        assert value.device.type == "meta"
        (gradient,) = torch.autograd.grad(value.sum(), x)
        assert gradient.shape == X.shape
    assert softdtw_from_cost(COST.to("meta")).shape == (2,)
    assert softdtw_cdist(x, y[:1]).shape == (2, 1)
    assert softdtw_alignment(x, y).shape == (2, 5, 4)
    with raises(TypeError, "torch.bfloat16", "torch.float32", "y.to(x.dtype)"):
        softdtw(x.bfloat16(), y)


def test_all_pairs_check_normalize_before_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    monkeypatch.setattr(softdtw_cuda._autograd, "values", computed.append)
    with raises(TypeError, "normalize must be True or False", "'yes'"):
        softdtw_cdist(X, Y, normalize="yes")
    assert computed == []


MIGRANTS: dict[str, tuple[Callable[..., object], str]] = {
    "softdtw": (lambda *args, **options: softdtw(X, Y, *args, **options), "softdtw()"),
    "divergence": (
        lambda *args, **options: softdtw_divergence(X, Y, *args, **options),
        "softdtw_divergence()",
    ),
    "from_cost": (lambda *args, **options: softdtw_from_cost(COST, *args, **options), "softdtw_from_cost()"),
    "alignment": (lambda *args, **options: softdtw_alignment(X, Y, *args, **options), "softdtw_alignment()"),
    "cdist": (lambda *args, **options: softdtw_cdist(X, Y, *args, **options), "softdtw_cdist()"),
    "barycenter": (lambda *args, **options: softdtw_barycenter(X, *args, **options), "softdtw_barycenter()"),
    "module": (SoftDTW, "SoftDTW.__init__()"),
}


@pytest.mark.parametrize(("call", "name"), MIGRANTS.values(), ids=MIGRANTS)
class TestMigration:
    """Arguments of other libraries."""

    def test_names(self, call: Callable[..., object], name: str) -> None:
        with raises(TypeError, name, "'use_cuda'", "use_cuda: leave it out: the tensors' device decides"):
            call(use_cuda=True)
        with raises(TypeError, name, "'dist_func'", "dist_func: pass it as dist="):
            call(dist_func=torch.cdist)
        if name not in ("softdtw_barycenter()", "softdtw_cdist()"):  # these have the present name
            with raises(TypeError, name, "'verbose'", "softdtw_barycenter", "progress=True"):
                call(verbose=True)
        with raises(TypeError, "use_cuda: leave", "dist_func: pass"):
            call(use_cuda=False, gamma=1.0, dist_func=None)

    def test_positions(self, call: Callable[..., object], name: str) -> None:
        for position in ((1.0,), (True, 1.0)):
            with raises(TypeError, name, "positional", "options are passed by name, for example gamma=0.1"):
                call(*position)

    def test_what_needs_no_hint(self, call: Callable[..., object], name: str) -> None:
        with pytest.raises(TypeError) as caught:
            call(no_such_option=1)
        assert str(caught.value) == f"{name} got an unexpected keyword argument 'no_such_option'"


def test_hints_leave_alone_what_a_function_takes() -> None:
    with raises(TypeError, "use_cuda:") as caught:
        softdtw_barycenter(X, device="cpu", lengths=[5, 5], use_cuda=True)
    assert "device:" not in str(caught.value)
    assert "lengths:" not in str(caught.value)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'y'$"):
        softdtw(X)  # type: ignore[call-arg]  # wrong on purpose


def test_verbose_is_the_former_name_of_progress(capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, object] = {"gamma": 0.5, "max_iter": 3}
    expected = softdtw_barycenter(X, **options)
    assert capfd.readouterr().err == ""
    for verbose in (True, False):
        with pytest.warns(DeprecationWarning, match="verbose= is deprecated, pass progress=") as caught:
            measured = softdtw_barycenter(X, verbose=verbose, **options)
        assert caught[0].filename == __file__
        assert torch.equal(measured, expected)
        assert ("barycenter" in capfd.readouterr().err) == verbose
    with raises(TypeError, "verbose"):
        softdtw_barycenter(X, verbose=True, progress=True)
    with raises(TypeError, "verbose:", "use_cuda:"):
        softdtw_barycenter(X, verbose=True, use_cuda=True)


def test_all_pairs_need_a_batch() -> None:
    with raises(ValueError, "3 dimensions", "(5, 3)", "(4, 3)", "x[None]"):
        softdtw_cdist(X[0], Y[0])
    # Of one set, only that is spoken of, and in words that arrays have, too.
    for call, start in ((softdtw_cdist, "x must have 3 dim"), (gamma_heuristic, "X must have 3 dim")):
        with raises(ValueError, start, "got shape (5, 3);", "[..., None]"):
            call(X[0].numpy())


def test_a_progress_that_is_no_flag() -> None:
    with raises(TypeError, "progress must be True or False, got 'no'"):
        softdtw_knn(X, Y, 1, progress="no")
    with raises(TypeError, "progress must be True or False, got 'no'"):
        softdtw_cdist(X, Y, progress="no")
    with raises(TypeError, "progress must be True or False, got 'no'"):
        softdtw_pairs(X, Y, [[0, 0]], progress="no")


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "longdouble", "U1"])
def test_arrays_of_other_types(dtype: str) -> None:
    array = np.zeros((2, 5, 1), dtype)
    for call in (softdtw_cdist, lambda x: softdtw_knn(x, None, 1), gamma_heuristic, distributed.cdist):
        with raises(TypeError, f"has dtype {array.dtype}, expected float64", ".astype(numpy.float32)"):
            call(array)
    with raises(TypeError, "x[0] has dtype", ".astype(numpy.float32)"):
        softdtw_cdist(list(array))


class TestCosts:
    def test_not_a_tensor(self) -> None:
        with raises(TypeError, "cost", "torch.Tensor", "ndarray"):
            softdtw_from_cost(np.zeros((2, 5, 4)))

    def test_not_a_float(self) -> None:
        with raises(TypeError, "cost has dtype", "torch.int64", "cost.float()"):
            softdtw_from_cost(COST.long())

    def test_wrong_rank(self) -> None:
        with raises(ValueError, "cost", "(batch, N, M)", "(4,)", "a row for each step"):
            softdtw_from_cost(torch.zeros(4))
        with raises(ValueError, "cost", "(batch, N, M)", "(1, 2, 3, 4)", "cost.flatten(0, -3)"):
            softdtw_from_cost(torch.zeros(1, 2, 3, 4))
        softdtw_from_cost(torch.zeros(1, 2, 3, 4).flatten(0, -3))

    @pytest.mark.parametrize("shape", [(2, 0, 4), (2, 4, 0), (0, 4)])
    def test_nothing_to_walk(self, shape: tuple[int, ...]) -> None:
        with raises(ValueError, "cost", str(shape), "at least 1"):
            softdtw_from_cost(torch.zeros(shape))

    def test_alignment_takes_one_kind_of_input(self) -> None:
        with raises(TypeError, "x and y, or cost", "both"):
            softdtw_alignment(X, Y, cost=COST)
        for pair, got in (((), "neither"), ((X,), "x alone"), ((None, Y), "y alone")):
            with raises(TypeError, "x and y, or cost", f"got {got}"):
                softdtw_alignment(*pair)


class TestLengths:
    CALLS = pytest.mark.parametrize(
        "call",
        [
            lambda **lengths: softdtw(X, Y, **lengths),
            lambda **lengths: softdtw_alignment(X, Y, **lengths),
            lambda **lengths: softdtw_cdist(X, Y, **lengths),
            lambda **lengths: softdtw_from_cost(COST, **lengths),
            lambda **lengths: SoftDTW()(X, Y, **lengths),
        ],
    )

    @CALLS
    @pytest.mark.parametrize("bad", [0, -2, 6])
    @pytest.mark.parametrize("kind", [list, torch.tensor])
    def test_out_of_range(self, call: Callable[..., object], bad: int, kind: Callable[..., object]) -> None:
        with raises(ValueError, f"x_lengths[1] is {bad}", "from 1 to 5", "padded length"):
            call(x_lengths=kind([5, bad]))
        with raises(ValueError, "y_lengths[0]", "from 1 to 4"):
            call(y_lengths=kind([bad - 1 if bad == 6 else bad, 2]))

    @CALLS
    def test_wrong_count(self, call: Callable[..., object]) -> None:
        with raises(ValueError, "x_lengths has shape (3,)", "2 sample(s)", "shape (2,)"):
            call(x_lengths=[5, 5, 5])
        with raises(ValueError, "y_lengths has shape (2, 1)", "shape (2,)"):
            call(y_lengths=torch.ones(2, 1, dtype=torch.int64))
        with raises(ValueError, "x_lengths has shape ()"):
            call(x_lengths=torch.tensor(5))

    @CALLS
    def test_wrong_type(self, call: Callable[..., object]) -> None:
        with raises(TypeError, "x_lengths has dtype torch.float32", "x_lengths.long()"):
            call(x_lengths=torch.tensor([5.0, 5.0]))
        for mask in (torch.ones(2, 5, dtype=torch.bool), np.ones((2, 5), dtype=bool)):
            with raises(TypeError, "x_lengths has dtype", "bool", "mask.sum(1)") as caught:
                call(x_lengths=mask)
            assert ".long()" not in str(caught.value)
            call(x_lengths=mask.sum(1))
        wrong: tuple[Any, ...] = ([5.0, 5.0], ["a", "b"], 5, {}.keys)
        for bad in wrong:
            with raises(TypeError, "y_lengths", "integer tensor or a list of integers"):
                call(y_lengths=bad)

    @CALLS
    def test_wrong_device(self, call: Callable[..., object]) -> None:
        with raises(ValueError, "x_lengths is on meta", "expected cpu", "make it on the CPU"):
            call(x_lengths=torch.ones(2, dtype=torch.int64, device="meta"))


class TestDistances:
    def test_unknown_name(self) -> None:
        with raises(ValueError, "dist is 'manhattan'", "'cityblock'", "callable"):
            softdtw(X, Y, dist="manhattan")
        with raises(ValueError, "dist is 'manhattan'"):
            SoftDTW(dist="manhattan")

    def test_wrong_type(self) -> None:
        with raises(TypeError, "dist", "NoneType", "string or a callable"):
            softdtw(X, Y, dist=None)

    def test_callable_with_the_wrong_shape(self) -> None:
        def flat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.unsqueeze(2) - y.unsqueeze(1)).abs()

        with raises(ValueError, "dist flat returned shape (2, 5, 4, 3)", "(B, N, M) = (2, 5, 4)"):
            softdtw(X, Y, dist=flat)
        with raises(ValueError, "returned shape (2, 4, 5)"):
            softdtw(X, Y, dist=lambda x, y: x.new_zeros(2, 4, 5))

    def test_callable_that_returns_something_else(self) -> None:
        with raises(TypeError, "returned float", "torch.Tensor"):
            softdtw(X, Y, dist=lambda x, y: 1.0)  # type: ignore[return-value]  # wrong on purpose
        with raises(TypeError, "returned dtype torch.int64", "float"):
            softdtw(X, Y, dist=lambda x, y: torch.zeros(2, 5, 4, dtype=torch.int64))
        with raises(ValueError, "returned a tensor on meta", "expected cpu"):
            softdtw(X, Y, dist=lambda x, y: torch.zeros(2, 5, 4, device="meta"))

    @pytest.mark.parametrize("dist", ["euclidean", "cityblock", torch.cdist])
    def test_fused_demanded_where_there_is_no_kernel(self, dist: object) -> None:
        with raises(ValueError, "fused=True", "dist='sqeuclidean' and 'cosine'", "fused=None"):
            softdtw(X, Y, dist=dist, fused=True)

    def test_fused_demanded_on_a_device_without_kernels(self) -> None:
        with raises(RuntimeError, "fused=True", "'meta'", "fused=None"):
            softdtw(X.to("meta"), Y.to("meta"), fused=True)


def test_reduction() -> None:
    with raises(ValueError, "reduction is 'average'", "'none', 'mean' or 'sum'"):
        SoftDTW(reduction="average")


class TestBarycenter:
    def test_series(self) -> None:
        with raises(ValueError, "X must have shape (K, N, D)", "(5, 3)", "X[..., None]"):
            softdtw_barycenter(X[0])
        with raises(ValueError, "(1, 2, 5, 3)", "X.flatten(0, 1)"):
            softdtw_barycenter(X.unsqueeze(0))
        with raises(TypeError, "X must be", "ndarray"):
            softdtw_barycenter(np.zeros((2, 5, 3)))
        with raises(TypeError, "X must be", "list", "torch.as_tensor"):
            softdtw_barycenter([np.zeros((5, 3)), np.zeros((4, 3))])
        with raises(TypeError, "X is a PackedSequence", "pad_packed_sequence(X, ", "X and lengths"):
            softdtw_barycenter(torch.nn.utils.rnn.pack_sequence([X[0], X[1, :2]]))
        with raises(ValueError, "X is on meta", "no numbers"):
            softdtw_barycenter(X.to("meta"))
        with raises(TypeError, "X has dtype torch.int64", "X.float()"):
            softdtw_barycenter(X.long())
        with raises(ValueError, "X has shape (0, 5, 3)", "at least one series"):
            softdtw_barycenter(X[:0])
        with raises(ValueError, "X is an empty list", "at least one (N, D) tensor"):
            softdtw_barycenter([])
        with raises(ValueError, "X[1] has shape (4, 2)", "(time, 3)"):
            softdtw_barycenter([X[0], Y[0, :, :2]])
        with raises(ValueError, "X[1] is torch.float64", "torch.float32"):
            softdtw_barycenter([X[0], Y[0].double()])
        with raises(ValueError, "lengths[1] is 0"):
            softdtw_barycenter([X[0], X[0, :0]])

    def test_lengths(self) -> None:
        with raises(ValueError, "lengths[0] is 9", "from 1 to 5"):
            softdtw_barycenter(X, lengths=[9, 5])
        with raises(ValueError, "lengths", "list", "leave it out"):
            softdtw_barycenter([X[0]], lengths=[5])
        with raises(ValueError, "length must be at least 1", "0"):
            softdtw_barycenter(X, length=0)

    @pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [math.nan, 1.0], [[1.0, 1.0]]])
    def test_weights(self, weights: list[float]) -> None:
        with raises(ValueError, "weights", "2 non-negative finite numbers"):
            softdtw_barycenter(X, weights=weights)

    def test_init(self) -> None:
        with raises(ValueError, "init has shape (5, 2)", "(L, 3)"):
            softdtw_barycenter(X, init=torch.zeros(5, 2))
        with raises(ValueError, "length is 7", "init has 5"):
            softdtw_barycenter(X, init=torch.zeros(5, 3), length=7)
        with raises(ValueError, "init is 'random'", "'mean'"):
            softdtw_barycenter(X, init="random")

    def test_options(self) -> None:
        with raises(ValueError, "optimizer is 'sgd'", "'lbfgs'"):
            softdtw_barycenter(X, optimizer="sgd")
        with raises(ValueError, "max_iter", "at least 0", "-1"):
            softdtw_barycenter(X, max_iter=-1)
        with raises(ValueError, "divergence is 'hard'", "'soft', 'sharp' or None"):
            softdtw_barycenter(X, divergence="hard")
        with raises(ValueError, "newton-cg", "divergence='sharp'", "optimizer='lbfgs'"):
            softdtw_barycenter(X, divergence="sharp", optimizer="newton-cg")
        with raises(TypeError, "callback", "callable", "3"):
            softdtw_barycenter(X, callback=3)
        with raises(ValueError, "bandwidth=1", "barycenter[0], X[0]", "lengths are 9 and 5"):
            softdtw_barycenter(X, bandwidth=1, length=9)
        with raises(ValueError, "dist is 'hamming'"):
            softdtw_barycenter(X, dist="hamming")
        with raises(ValueError, "gamma"):
            softdtw_barycenter(X, gamma=0)

    def test_broken_numbers(self) -> None:
        broken = X.clone()
        broken[0, 2] = math.nan
        with raises(ValueError, "first iterate is nan", "NaN"):
            softdtw_barycenter(broken)


class TestBarycenters:
    def test_labels(self) -> None:
        for labels in (
            [0.0, 1.0],
            torch.tensor([True, False]),
            np.array(["a", "b"]),
            [None, 1],
            [[0], [1, 2]],
        ):
            with raises(TypeError, "labels", "integers"):
                softdtw_barycenters(X, labels)
        with raises(ValueError, "labels has shape (3,)", "(2,)"):
            softdtw_barycenters(X, [0, 1, 0])
        with raises(ValueError, "labels[1] is -1", "from 0"):
            softdtw_barycenters(X, [0, -1])
        with raises(ValueError, "labels[0] is 2", "from 0 to 1", "2 clusters"):
            softdtw_barycenters(X, [2, 0], 2)
        with raises(ValueError, "n_clusters", "at least 1"):
            softdtw_barycenters(X, [0, 0], 0)

    def test_empty_clusters(self) -> None:
        with raises(ValueError, "clusters 0, 2 have no series of positive weight", "pass init"):
            softdtw_barycenters(X, [1, 3])
        with raises(ValueError, "clusters 1 have no series of positive weight"):
            softdtw_barycenters(X, [0, 1], weights=[1.0, 0.0])

    def test_init(self) -> None:
        with raises(ValueError, "init has shape (5, 3)", "(2, L, 3)"):
            softdtw_barycenters(X, [0, 1], init=torch.zeros(5, 3))
        with raises(ValueError, "init has shape (3, 5, 3)", "(2, L, 3)"):
            softdtw_barycenters(X, [0, 1], 2, init=torch.zeros(3, 5, 3))
        with raises(TypeError, "init", "(2, L, 3)", "ndarray"):
            softdtw_barycenters(X, [0, 1], init=np.zeros((2, 5, 3)))

    def test_broken_numbers(self) -> None:
        broken = X.clone()
        broken[1, 2] = math.nan
        with raises(ValueError, "first iterate of cluster 0 is nan", "NaN"):
            softdtw_barycenters(broken, [1, 0])


class TestOmega:
    @pytest.mark.parametrize(
        ("omega", "words"),
        [
            ("diagonal", ("omega is 'diagonal'", "'position'")),
            (torch.zeros(4, 5), ("omega has shape (4, 5)", "(5, 4)", "(2, 5, 4)")),
            (torch.zeros(3, 5, 4), ("omega has shape (3, 5, 4)", "batch size 2")),
            ((torch.zeros(5, 1), torch.zeros(4, 2)), ("omega[0]", "1 features", "omega[1]")),
            ((torch.zeros(4, 1), torch.zeros(4, 1)), ("omega[0] has 4 time steps", "expected 5, as x has")),
            ((torch.zeros(5, 1), torch.zeros(5, 1)), ("omega[1] has 5 time steps", "expected 4, as y has")),
        ],
    )
    def test_shapes(self, omega: object, words: tuple[str, ...]) -> None:
        with raises(ValueError, *words):
            softdtw_expected_cost(X, Y, omega=omega)

    @pytest.mark.parametrize(
        ("omega", "words"),
        [
            (torch.zeros(5, 4, dtype=torch.int64), ("omega has dtype torch.int64", "omega.float()")),
            (3.0, ("omega must be 'position', a tensor, or a pair", "got float")),
            ((torch.zeros(5, 1), [1.0]), ("omega[1] must be a torch.Tensor", "got list")),
        ],
    )
    def test_types(self, omega: object, words: tuple[str, ...]) -> None:
        with raises(TypeError, *words):
            softdtw_expected_cost(X, Y, omega=omega)

    def test_a_batch_for_one_pair(self) -> None:
        with raises(ValueError, "omega has shape (2, 5, 4)", "2 dimensions"):
            softdtw_expected_cost(X[0], Y[0], omega=torch.zeros(2, 5, 4))

    def test_kind_of_divergence(self) -> None:
        with raises(ValueError, "kind is 'hard'", "'soft', 'sharp' or 'mean_cost'"):
            softdtw_divergence(X, Y, kind="hard")

    @pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
    def test_alpha(self, alpha: float) -> None:
        with raises(ValueError, "alpha must be a"):
            DilateLoss(alpha=alpha)
        loss = DilateLoss()
        loss.alpha = alpha
        with raises(ValueError, "alpha must be a"):
            loss(X, X)
        with raises(ValueError, "reduction is 'all'"):
            DilateLoss(reduction="all")


class TestThirdOrder:
    """No third derivative is ever returned, because it would be wrong."""

    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"dist": "cosine"}, {"normalize": True}])
    def test_create_graph(self, device: str, options: dict[str, Any]) -> None:
        x = torch.randn(1, 5, 2, dtype=torch.float64, device=device, requires_grad=True)
        y = torch.randn(1, 4, 2, dtype=torch.float64, device=device)
        (gradient,) = torch.autograd.grad(softdtw(x, y, **options).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
        with raises(RuntimeError, "create_graph=True", "third derivatives"):
            second.sum().backward()

    def test_cost(self, device: str) -> None:
        cost = torch.rand(1, 5, 4, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(softdtw_from_cost(cost).sum(), cost, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), cost, create_graph=True)
        with raises(RuntimeError, "third derivatives"):
            second.sum().backward()

    @pytest.mark.parametrize(
        "function", [softdtw_expected_cost, softdtw_sharp, softdtw_entropy, DilateLoss()]
    )
    def test_losses_on_the_alignment(self, device: str, function: Callable[..., torch.Tensor]) -> None:
        x = torch.randn(1, 5, 2, device=device, requires_grad=True)
        loss = function(x, torch.randn(1, 4, 2, device=device))
        (gradient,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        with raises(RuntimeError, "third derivatives"):
            gradient.sum().backward()

    def test_alignment(self, device: str) -> None:
        x = torch.randn(1, 5, 2, device=device, requires_grad=True)
        alignment = softdtw_alignment(x, torch.randn(1, 4, 2, device=device))
        (gradient,) = torch.autograd.grad(alignment.square().sum(), x, create_graph=True)
        with raises(RuntimeError, "third derivatives"):
            gradient.sum().backward()

    def test_operators(self, device: str) -> None:
        x = torch.randn(1, 5, 2, device=device, requires_grad=True)
        y = torch.randn(1, 4, 2, device=device)
        value, _ = torch.ops.softdtw_cuda.forward(x, y, None, None, 1.0, -1, True, True)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
        with raises(RuntimeError, "third derivatives"):
            second.sum().backward()

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
    def test_nested_transforms(self, device: str) -> None:
        x = torch.randn(1, 5, 2, device=device)
        y = torch.randn(1, 4, 2, device=device)

        def value(x: torch.Tensor) -> torch.Tensor:
            return softdtw(x, y).sum()

        def slope(x: torch.Tensor) -> torch.Tensor:
            gradient: torch.Tensor = torch.func.grad(value)(x)
            return gradient.square().sum()

        for third in (
            torch.func.hessian(slope),
            torch.func.grad(lambda x: torch.func.grad(slope)(x).sum()),
            torch.func.jacfwd(torch.func.hessian(value)),
        ):
            with raises(RuntimeError, "third derivatives"):
                third(x)


def test_operator_without_saved_state_has_no_gradient() -> None:
    x = torch.randn(1, 5, 2, requires_grad=True)
    value, _ = torch.ops.softdtw_cuda.forward(x, Y[:1, :, :2], None, None, 1.0, -1, False, False)
    with raises(RuntimeError, "need_x", "need_y"):
        value.sum().backward()


def test_operator_checks_host_lengths() -> None:
    with raises(ValueError, "x_lengths[0] is 9"):
        torch.ops.softdtw_cuda.forward(X, Y, torch.tensor([9, 5]), None, 1.0, -1, False, False)
    with raises(ValueError, "bandwidth=1", "sample 1"):
        torch.ops.softdtw_cuda.forward(COST, None, None, torch.tensor([4, 2]), 1.0, 1, False, False)


OPTIONS = (1.0, -1, True, True)
"""gamma, bandwidth and the gradients that are needed."""


@pytest.mark.parametrize(
    "operands",
    [
        (X[0], Y, None, None, *OPTIONS),
        (X, Y.double(), None, None, *OPTIONS),
        (X, Y[:, :, :1], None, None, *OPTIONS),
        (X[[0, 1, 0]], Y, None, None, *OPTIONS),
        (X[:, :0], Y, None, None, *OPTIONS),
        (X.int(), Y.int(), None, None, *OPTIONS),
        (X, None, None, None, *OPTIONS, torch.zeros(1, 2, dtype=torch.int32)),
        (X, Y, None, None, *OPTIONS, torch.zeros(1, 3, dtype=torch.int32)),
        (X, Y, None, None, *OPTIONS, torch.zeros(1, 2)),
    ],
)
def test_operators_check_what_kernels_read(operands: tuple[Any, ...]) -> None:
    """Nothing else does where they are called by hand."""
    with raises(ValueError, "an operator got", "call softdtw"):
        torch.ops.softdtw_cuda.forward(*operands)
    value = torch.ones(2)
    with raises(ValueError, "an operator got"):
        torch.ops.softdtw_cuda.backward(value, value, torch.empty(0, dtype=torch.uint8), *operands)


def test_operators_check_lengths_of_a_broadcast_side() -> None:
    with raises(ValueError, "one for each"):
        torch.ops.softdtw_cuda.forward(X[:1], Y, torch.tensor([2]), None, *OPTIONS)


def test_operators_check_what_the_forward_saved() -> None:
    x, y = torch.randn(2, 300, 2), torch.randn(2, 300, 2)
    value, state = torch.ops.softdtw_cuda.forward(x, y, None, None, *OPTIONS)
    for error, saved in (
        (RuntimeError, (value, value, state[:-4])),
        (ValueError, (value[:1], value, state)),
        (ValueError, (value, value[:1], state)),
    ):
        with raises(error, "expected"):
            torch.ops.softdtw_cuda.backward(*saved, x, y, None, None, *OPTIONS)
        with raises(error, "expected"):
            torch.ops.softdtw_cuda.expected_backward(
                *saved, x, y, None, None, *OPTIONS, None, "position", None, None, False, False
            )


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("slope", None, None),
        ("position", X, None),
        ("matrix", X, None),
        ("tangents", X[:, 1:], None),
        ("tangents", None, Y[..., :1]),
        ("tangents", X[[0, 1, 0]], None),
        ("features", X, None),
        ("features", X, Y[..., :1]),
        ("features", X, Y[:, 1:]),
    ],
)
def test_operators_check_directions(kind: str, a: Any, b: Any) -> None:
    with raises(ValueError, "an operator got"):
        torch.ops.softdtw_cuda.expected(X, Y, None, None, *OPTIONS, None, kind, a, b, False, False)


@pytest.mark.parametrize("bad", [0, -3, 99])
@pytest.mark.parametrize("options", [{}, {"dist": "euclidean"}], ids=str)
def test_lengths_inside_transforms(bad: int, options: dict[str, Any]) -> None:
    """The backend is the first that sees their numbers."""
    lengths = torch.tensor([[1, 2], [2, bad]])
    words = (f"x_lengths[3] is {bad}", f"from 1 to {X.shape[1]}")
    with raises(ValueError, *words):
        torch.vmap(lambda each: softdtw(X, Y, x_lengths=each, **options))(lengths)
    with raises(ValueError, f"is {bad}", *words[1:]):
        torch.vmap(torch.vmap(lambda each: softdtw_cdist(X, Y, x_lengths=each, **options)))(lengths[None])
    with raises(ValueError, f"x_lengths[1] is {bad}"):
        torch.func.grad(lambda x, each: softdtw(x, Y, x_lengths=each, **options).sum())(X, lengths[1])


@pytest.mark.parametrize("options", [{}, {"dist": "euclidean"}], ids=str)
def test_bands_inside_transforms(options: dict[str, Any]) -> None:
    lengths = torch.tensor([[3, 3], [3, 1]])
    with raises(ValueError, "bandwidth=1", "sample 3", "1 and 3"):
        torch.vmap(lambda each: softdtw(X[:, :3], Y[:, :3], x_lengths=each, bandwidth=1, **options))(lengths)


def test_public_names() -> None:
    for name in softdtw_cuda.__all__:
        assert getattr(softdtw_cuda, name).__doc__


@pytest.mark.parametrize("bandwidth", [2**31, sys.maxsize - 127, sys.maxsize, 10**30, 1e30])
@pytest.mark.parametrize("length", [10, 300])
def test_a_band_wider_than_any_series_is_none(bandwidth: float, length: int) -> None:
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.randn(2, length + 5, 3, generator=torch.Generator().manual_seed(1))
    for fused in (True, False):
        expected, measured = (softdtw(x, y, bandwidth=b, fused=fused) for b in (2 * length, bandwidth))
        assert torch.equal(expected, measured)
        gradients = [torch.autograd.grad(value.sum(), x)[0] for value in (expected, measured)]
        assert torch.equal(*gradients)
    huge = min(int(bandwidth), sys.maxsize)
    value, _ = torch.ops.softdtw_cuda.forward(x.detach(), y, None, None, 1.0, huge, False, False)
    assert torch.equal(value, softdtw(x.detach(), y, bandwidth=2 * length))


@pytest.mark.parametrize("value", [2, -1, "yes", 0.5, 1.0, torch.tensor(True, dtype=torch.bool).repeat(2)])
@pytest.mark.parametrize("name", ["fused", "normalize"])
def test_flags_are_flags(name: str, value: object) -> None:
    for call in (lambda **k: softdtw(X, Y, **k), lambda **k: softdtw_cdist(X, Y, **k), SoftDTW):
        with raises(TypeError, name, "True or False"):
            call(**{name: value})


def test_flags_may_be_one_and_zero() -> None:
    for one, zero in ((1, 0), (np.int64(1), np.int64(0))):
        assert torch.equal(softdtw(X, Y, normalize=one), softdtw(X, Y, normalize=True))
        assert torch.equal(SoftDTW(normalize=zero, fused=one)(X, Y), softdtw(X, Y, normalize=False))
    assert "normalize=True" in repr(SoftDTW(normalize=1))


def test_flags_may_be_numpys() -> None:
    assert torch.equal(softdtw(X, Y, normalize=np.True_), softdtw(X, Y, normalize=True))
    with raises(ValueError, "fused=True", "'cityblock'"):
        softdtw(X, Y, fused=np.True_, dist="cityblock")


def test_a_module_that_no_call_could_use() -> None:
    with raises(ValueError, "fused=True", "got dist='euclidean'"):
        SoftDTW(fused=True, dist="euclidean")


def test_gamma_beyond_every_float() -> None:
    with raises(ValueError, "gamma", "finite"):
        softdtw(X, Y, gamma=10**400)
    with raises(ValueError, "tol", "finite"):
        softdtw_barycenter(X, tol=10**400)


@pytest.mark.parametrize("lengths", [{3, 4}, {3: 1, 4: 2}, [True, True], (3, False)])
def test_lengths_without_order_or_number(lengths: object) -> None:
    with raises(TypeError, "x_lengths", "a list of integers"):
        softdtw(X, Y, x_lengths=lengths)


class TestBarycenterOptions:
    @pytest.mark.parametrize("name", ["early_stopping", "progress", "return_info"])
    def test_flags(self, name: str) -> None:
        with raises(TypeError, f"{name} must be True or False, got 'no'"):
            softdtw_barycenter(X, **{name: "no"})
        with raises(TypeError, f"{name} must be True or False, got 'no'"):
            softdtw_barycenters(X, [0, 1], **{name: "no"})

    @pytest.mark.parametrize("name", ["max_iter", "length", "patience"])
    def test_counts(self, name: str) -> None:
        for wrong in (2.5, "5", True, [3]):
            with raises(TypeError, name, "an integer"):
                softdtw_barycenter(X, **{name: wrong})
        least = 0 if name == "max_iter" else 1
        with raises(ValueError, name, f"at least {least}"):
            softdtw_barycenter(X, **{name: least - 1})

    @pytest.mark.parametrize("name", ["lr", "tol"])
    def test_numbers(self, name: str) -> None:
        for wrong in ("x", True, [0.1]):
            with raises(TypeError, name, "a real number"):
                softdtw_barycenter(X, **{name: wrong})
        for number in (-1.0, math.nan, math.inf):
            with raises(ValueError, name, "finite"):
                softdtw_barycenter(X, **{name: number})
        with raises(ValueError, "lr", "greater than 0"):
            softdtw_barycenter(X, lr=0)

    def test_tensors(self) -> None:
        with raises(TypeError, "init", "ndarray", "torch.as_tensor"):
            softdtw_barycenter(X, init=np.zeros((5, 3)))
        with raises(TypeError, "weights", "'a'"):
            softdtw_barycenter(X, weights="a")

    def test_inference_mode(self) -> None:
        expected = softdtw_barycenter(X, max_iter=3)
        with torch.inference_mode():
            assert torch.equal(softdtw_barycenter(X.clone(), max_iter=3), expected)


def test_an_empty_batch_has_no_sample_without_a_path() -> None:
    empty = torch.zeros(0, 5, 3, requires_grad=True)
    for fused in (True, False):
        value = softdtw(empty, torch.zeros(0, 4, 3), bandwidth=0, fused=fused)
        assert value.shape == (0,)
        value.sum().backward()


def test_a_reduction_changed_to_nonsense() -> None:
    module = SoftDTW()
    module.reduction = "all"  # type: ignore[assignment]  # wrong on purpose
    with raises(ValueError, "reduction", "'all'", "'mean'"):
        module(X, Y)
