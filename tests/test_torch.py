"""The loss among torch's own machinery: operators, compile, autocast, torch.func, threads, modules."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from softdtw_cuda import SoftDTW, _backends, softdtw, softdtw_alignment, softdtw_cdist, softdtw_from_cost
from softdtw_cuda._cpu import launch
from softdtw_cuda._problem import (
    BACKWARD,
    EXPECTED,
    EXPECTED_BACKWARD,
    FORWARD,
    NO_BAND,
    Direction,
    Operator,
    Problem,
)
from tests.in_threads import in_threads
from tests.oracle import truth


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 40, 4, device=device, dtype=dtype, requires_grad=True)
    y = torch.randn(3, 35, 4, device=device, dtype=dtype, requires_grad=True)
    return x, y


LENGTHS = ([40, 7, 23], [35, 9, 20])


def problem_of(
    device: str, dtype: torch.dtype = torch.float32, lengths: bool = False, bandwidth: int = NO_BAND
) -> Problem:
    both = [torch.tensor(given, dtype=torch.int64, device=device) if lengths else None for given in LENGTHS]
    return Problem(*inputs(device, dtype), *both, 0.5, bandwidth, True, True)


def detached(problem: Problem) -> Problem:
    return problem._replace(x=problem.x.detach(), y=None if problem.y is None else problem.y.detach())


@pytest.fixture
def _garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds other bytes every time."""
    fills = itertools.cycle(range(1, 251, 7))
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *args, **options: (
            made.fill_(next(fills)) if (made := empty(*args, **options)).dtype == torch.uint8 else made
        ),
    )


class TestOperators:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("bandwidth", [NO_BAND, 6])
    @pytest.mark.parametrize("lengths", [False, True])
    def test_forward(self, device: str, dtype: torch.dtype, bandwidth: int, lengths: bool) -> None:
        problem = problem_of(device, dtype, lengths, bandwidth)
        operator = torch.ops.softdtw_cuda.forward
        torch.library.opcheck(operator, problem[:8])
        without = detached(problem)._replace(need_x=False, need_y=False)[:8]
        torch.library.opcheck(operator, without)
        assert operator(*without)[1].numel() == 0

    def test_forward_broadcast(self, device: str) -> None:
        problem = problem_of(device)
        problem = problem._replace(x=problem.x.detach()[:1].requires_grad_())
        torch.library.opcheck(torch.ops.softdtw_cuda.forward, problem[:8])

    @pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_backward(self, device: str, needed: tuple[bool, bool], rows: int) -> None:
        problem = detached(problem_of(device, torch.bfloat16))
        problem = problem._replace(x=problem.x[:rows], need_x=needed[0], need_y=needed[1])
        value, state = torch.ops.softdtw_cuda.forward(*problem[:8])
        arguments = (torch.randn(3, device=device), value, state, *problem[:8])
        operator = torch.ops.softdtw_cuda.backward
        torch.library.opcheck(operator, arguments)
        grad_x, grad_y = operator(*arguments)
        assert grad_x.shape == ((3, 40, 4) if needed[0] else (0,))
        assert grad_y.shape == ((3, 35, 4) if needed[1] else (0,))
        if needed[0]:
            assert grad_x.dtype == (torch.float32 if rows == 1 else torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
    def test_cost(self, device: str, dtype: torch.dtype) -> None:
        cost = torch.rand(2, 30, 33, device=device).to(dtype).requires_grad_()
        problem = Problem(cost, None, None, None, 0.5, 5, True)
        torch.library.opcheck(torch.ops.softdtw_cuda.forward, problem[:8])
        problem = detached(problem)
        value, state = torch.ops.softdtw_cuda.forward(*problem[:8])
        arguments = (torch.ones_like(value), value, state, *problem[:8])
        torch.library.opcheck(torch.ops.softdtw_cuda.backward, arguments)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("bandwidth", [NO_BAND, 6])
    @pytest.mark.parametrize("lengths", [False, True])
    @pytest.mark.usefixtures("_garbage")
    def test_state_is_bitwise_deterministic(self, dtype: torch.dtype, bandwidth: int, lengths: bool) -> None:
        problem = problem_of("cpu", dtype, lengths, bandwidth)
        first, second = (torch.ops.softdtw_cuda.forward(*detached(problem)[:8])[1] for _ in range(2))
        assert torch.equal(first, second)

    @pytest.mark.usefixtures("_garbage")
    def test_opcheck_meets_other_bytes_in_new_memory(self) -> None:
        torch.library.opcheck(torch.ops.softdtw_cuda.forward, problem_of("cpu")[:8])

    @pytest.mark.parametrize("size", [270, 330])  # of smaller pairs the state is the gradients
    def test_backward_reads_what_forward_wrote(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        x, y = torch.randn(2, size, 3), torch.randn(2, size - 5, 3)
        problem = Problem(x, y, torch.tensor([size, 9], dtype=torch.int64), None, 0.5, NO_BAND, True, True)
        value, state = _backends.forward(problem)
        monkeypatch.setattr(launch, "zeros", lambda shape, dtype: torch.full(shape, 255, dtype=dtype))
        _, other = _backends.forward(problem)
        monkeypatch.undo()
        assert not torch.equal(state, other)  # not all bytes are written
        gradients = [_backends.backward(problem, torch.ones(2), value, each) for each in (state, other)]
        for first, second in zip(*gradients, strict=True):
            assert torch.equal(first, second)

    @pytest.mark.parametrize("operator", [FORWARD, BACKWARD, EXPECTED, EXPECTED_BACKWARD])
    def test_arguments_have_the_names_of_their_fields(self, operator: Operator) -> None:
        schema = getattr(torch.ops.softdtw_cuda, operator.name).default._schema
        assert tuple(argument.name for argument in schema.arguments) == operator.names
        assert operator.row(*operator.parts(range(len(operator.names)))) == (*range(len(operator.names)),)

    @pytest.mark.parametrize("registered", [False, True])
    @pytest.mark.parametrize("size", [40, 300])  # the state is gradients, or edges of tiles
    @pytest.mark.parametrize("from_cost", [False, True])
    def test_a_state_of_another_size_is_refused(
        self, device: str, from_cost: bool, size: int, registered: bool
    ) -> None:
        x, y = torch.randn(2, size, 3, device=device), torch.randn(2, size - 5, 3, device=device)
        problem = Problem(x, y, None, None, 0.5, NO_BAND, True, True)
        if from_cost:
            problem = Problem(torch.cdist(x, y), None, None, None, 0.5, NO_BAND, True)
        for forward, backward, direction in (
            (FORWARD, BACKWARD, None),
            (EXPECTED, EXPECTED_BACKWARD, Direction("position")),
        ):

            def call(operator: Operator, direction: Direction | None, *saved: torch.Tensor) -> Any:
                if registered:
                    row = operator.row(problem, direction, saved)
                    return getattr(torch.ops.softdtw_cuda, operator.name)(*row)
                directions = () if direction is None else (direction,)
                return getattr(_backends, operator.name)(problem, *directions, *saved)

            *_, value, state = call(forward, direction)
            grad = torch.ones_like(value)
            call(backward, direction, grad, value, state)
            shorter = (state[:-16], state[:0]) if state.numel() else ()  # costs of one tile save nothing
            for wrong in (torch.cat([state, state.new_zeros(16)]), *shorter):
                with pytest.raises(
                    RuntimeError, match=f"has {wrong.numel()} bytes, expected {state.numel()}"
                ):
                    call(backward, direction, grad, value, wrong)

    def test_the_short_way_and_the_operators_agree(self, device: str) -> None:
        """Plain eager tensors go past the dispatcher; a dispatch mode makes them go through it."""

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            seen: list[str] = []  # noqa: RUF012  # one instance, one test

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
                self.seen.append(str(function))
                return function(*args, **(kwargs or {}))

        for loss in (softdtw, lambda x, y: softdtw(x, y, fused=False)):
            x, y = inputs(device)
            value = loss(x, y)
            value.sum().backward()
            expected = (value.detach(), x.grad, y.grad)
            x.grad = y.grad = None
            with Watch() as watch:  # type: ignore[no-untyped-call]  # torch's
                value = loss(x, y)
                value.sum().backward()
            for ours, theirs in zip((value.detach(), x.grad, y.grad), expected, strict=True):
                assert torch.equal(ours, theirs)
            assert any("softdtw_cuda" in name and "forward" in name for name in watch.seen)
            assert any("softdtw_cuda" in name and "backward" in name for name in watch.seen)


@pytest.fixture
def _quiet_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # torch's own compiler deprecates parts of torch; nothing of ours is involved.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield
    torch._dynamo.reset()


COMPILED: dict[str, Callable[..., torch.Tensor]] = {
    "fused": lambda x, y: softdtw(x, y, gamma=0.5),
    "cost": lambda x, y: softdtw(x, y, gamma=0.5, fused=False, bandwidth=8),
    "normalize": lambda x, y: softdtw(x, y, gamma=0.5, normalize=True),
    "broadcast": lambda x, y: softdtw(x[:1], y, gamma=0.5),
    "lists": lambda x, y: softdtw(x, y, gamma=0.5, x_lengths=[40, 7, 23]),
    "euclidean": lambda x, y: softdtw(x, y, gamma=0.5, dist="euclidean"),
    "cityblock": lambda x, y: softdtw(x, y, gamma=0.5, dist="cityblock"),
    "cosine": lambda x, y: softdtw(x, y, gamma=0.5, dist="cosine"),
    "callable": lambda x, y: softdtw(x, y, dist=lambda a, b: (a.unsqueeze(2) - b.unsqueeze(1)).abs().sum(3)),
    "module": lambda x, y: SoftDTW(gamma=0.5, reduction="mean")(2 * x, y + 1),
    "unbatched": lambda x, y: softdtw(x[0], y[0]),
}


@pytest.mark.usefixtures("_quiet_compiler")
class TestCompile:
    @pytest.mark.parametrize("name", COMPILED)
    def test_fullgraph(self, device: str, name: str) -> None:
        if name == "callable" and TorchVersion(torch.__version__) < "2.13":
            pytest.skip("an older compiler gets the function as a whole, without callables")
        # aot_eager traces everything that inductor would and needs no C++ compiler.
        eager, compiled = COMPILED[name], torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
        x, y = inputs(device)
        expected = eager(x, y)
        expected.sum().backward()
        expected_grads = (x.grad, y.grad)
        x.grad = y.grad = None
        value = compiled(x, y)
        value.sum().backward()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        for grad, expected_grad in zip((x.grad, y.grad), expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)

    def test_nothing_of_ours_is_warned_about(self, device: str) -> None:
        compiled = torch.compile(lambda x, y: softdtw(x, y, fused=True), fullgraph=True, backend="aot_eager")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(*inputs(device)).sum().backward()
        assert [each for each in caught if "lru_cache" in str(each.message)] == []

    def test_lengths_as_graph_inputs(self, device: str) -> None:
        def loss(x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return softdtw(x, y, x_lengths=lengths, bandwidth=20)

        x, y = (side.detach() for side in inputs(device))
        lengths = torch.tensor([40, 20, 30], device=device)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, y, lengths), loss(x, y, lengths))
        bad = torch.tensor([40, 20, 99], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"x_lengths\[2\] is 99"):
                compiled(x, y, bad)
        else:
            assert compiled(x, y, bad).isnan().tolist() == [False, False, True]

    @pytest.mark.parametrize("far", [2**32 + 5, -(2**32) + 5])
    def test_lengths_beyond_32_bits(self, device: str, far: int) -> None:
        """Cut to 32 bits, they would be right."""
        x, y = (side.detach() for side in inputs(device))
        bad = torch.tensor([40, 20, far], device=device)
        for function in (softdtw, torch.compile(softdtw, fullgraph=True, backend="aot_eager")):
            if device == "cpu":
                with pytest.raises(ValueError, match=r"x_lengths\[2\] is -?\d+, expected a length"):
                    function(x, y, x_lengths=bad)
            else:
                assert function(x, y, x_lengths=bad).isnan().tolist() == [False, False, True]

    def test_changing_shapes(self, device: str) -> None:
        compiled = torch.compile(
            lambda x, y: softdtw(x, y).sum(), fullgraph=True, backend="aot_eager", dynamic=True
        )
        for batch, n, m in ((2, 10, 12), (3, 40, 35), (5, 130, 129)):
            x = torch.randn(batch, n, 3, device=device, requires_grad=True)
            y = torch.randn(batch, m, 3, device=device)
            compiled(x, y).backward()
            expected = truth(x, y, 1.0)
            torch.testing.assert_close(x.grad.cpu().double(), expected.grad_x, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("kind", [list, torch.tensor], ids=["list", "tensor"])
    def test_lengths_with_changing_shapes(self, device: str, kind: Callable[[list[int]], Any]) -> None:
        compiled = torch.compile(softdtw, fullgraph=True, backend="aot_eager", dynamic=True)
        x, y = torch.randn(3, 10, 2, device=device), torch.randn(3, 12, 2, device=device)
        for lengths in ([10, 4, 1], [2, 2, 9]):
            ours = compiled(x, y, x_lengths=kind(lengths))
            assert torch.equal(ours, softdtw(x, y, x_lengths=lengths))

    def test_double_backward_still_raises(self, device: str) -> None:
        x, y = inputs(device)
        value = torch.compile(softdtw, fullgraph=True, backend="aot_eager")(x, y).sum()
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(grad.sum(), x)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"dist": "cosine"}, {"dist": "euclidean"}])
    def test_it_does_not_change_what_the_loss_computes_in(
        self, device: str, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        x, y = inputs(device)
        value = softdtw(x, y, **options)
        value.sum().backward()
        expected = (value.detach(), x.grad, y.grad)
        x.grad = y.grad = None
        with torch.autocast(device, dtype=dtype):
            value = softdtw(x, y, **options)
            value.sum().backward()
        assert value.dtype == torch.float32
        for ours, theirs in zip((value.detach(), x.grad, y.grad), expected, strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"dist": "cosine"}, {"dist": "euclidean"}])
    def test_nor_second_derivatives(self, device: str, options: dict[str, Any]) -> None:
        x, y = inputs(device)

        def second() -> tuple[torch.Tensor, ...]:
            (gradient,) = torch.autograd.grad(softdtw(x, y, **options).sum(), x, create_graph=True)
            return torch.autograd.grad(gradient.square().sum(), (x, y))

        expected = second()
        with torch.autocast(device, dtype=torch.bfloat16):
            for ours, theirs in zip(second(), expected, strict=True):
                assert torch.equal(ours, theirs)

    def test_a_network_under_autocast_against_a_float32_target(self, device: str) -> None:
        layer = torch.nn.Linear(4, 4).to(device)
        x, y = torch.randn(2, 30, 4, device=device), torch.randn(2, 25, 4, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            prediction = layer(x)
            assert prediction.dtype == torch.bfloat16
            value = softdtw(prediction, y, gamma=0.1)
        assert value.dtype == torch.float32
        value.sum().backward()
        expected = truth(prediction, y, 0.1)
        torch.testing.assert_close(value.detach().cpu().double(), expected.value, rtol=1e-6, atol=1e-5)
        assert torch.isfinite(layer.weight.grad).all()
        assert layer.weight.grad.abs().sum() > 0

    def test_mixed_types_outside_autocast_are_refused(self, device: str) -> None:
        x, y = inputs(device)
        with pytest.raises(TypeError, match="dtype"):
            softdtw(x.bfloat16(), y)


class TestFunc:
    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"normalize": True}, {"dist": "cityblock"}])
    def test_grad(self, device: str, options: dict[str, Any]) -> None:
        x, y = inputs(device, torch.float64)
        softdtw(x, y, **options).sum().backward()
        x_grad, y_grad = torch.func.grad(lambda x, y: softdtw(x, y, **options).sum(), argnums=(0, 1))(
            x.detach(), y.detach()
        )
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(y_grad, y.grad)

    def test_vjp_of_a_cost(self, device: str) -> None:
        cost = torch.rand(2, 9, 8, dtype=torch.float64, device=device)
        weights = torch.tensor([2.0, -1.0], dtype=torch.float64, device=device)
        pull_back = torch.func.vjp(softdtw_from_cost, cost)[1]
        expected = softdtw_alignment(cost=cost) * weights.view(2, 1, 1)
        torch.testing.assert_close(pull_back(weights)[0], expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_tensor_kept_beyond_its_transform(self, device: str, dtype: torch.dtype) -> None:
        plain, y = inputs(device, dtype)
        kept = []

        def keeps(x: torch.Tensor) -> torch.Tensor:
            kept.append(x * 1)
            return x.sum()

        torch.func.grad(keeps)(plain.detach())
        for call in (softdtw, lambda x, y: softdtw_from_cost(x @ y.mT)):
            expected = call(plain.detach(), y)
            value = call(kept[0], y)
            (expected_grad,) = torch.autograd.grad(expected.sum(), y)
            (grad,) = torch.autograd.grad(value.sum(), y)
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
            torch.testing.assert_close(grad, expected_grad, rtol=0, atol=0)
            with torch.no_grad():
                torch.testing.assert_close(call(kept[0], y), expected, rtol=0, atol=0)
        torch.testing.assert_close(softdtw_from_cost(kept[0]), softdtw_from_cost(plain), rtol=0, atol=0)


SEVERAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fused": softdtw,
    "cost": lambda x, y: softdtw(x, y, fused=False),
    "normalize": lambda x, y: softdtw(x, y, normalize=True),
    "broadcast": lambda x, y: softdtw(x[:1], y),
    "lengths": lambda x, y: softdtw(x, y, x_lengths=LENGTHS[0], y_lengths=LENGTHS[1]),
    "band": lambda x, y: softdtw(x, y, bandwidth=9),
    "euclidean": lambda x, y: softdtw(x, y, dist="euclidean"),
    "cosine": lambda x, y: softdtw(x, y, dist="cosine"),
    "from_cost": lambda x, y: softdtw_from_cost(x @ y.mT),
    "cdist": lambda x, y: softdtw_cdist(x, y[:2]).flatten(),
}


@pytest.mark.parametrize("name", SEVERAL)
class TestSeveralGradientsInOneCall:
    """Batches of gradients, which torch maps in another way than torch.func.vmap."""

    def test_is_grads_batched(self, device: str, name: str) -> None:
        x, y = inputs(device, torch.float64)
        value = SEVERAL[name](x, y)
        weights = torch.randn(4, *value.shape, device=device, dtype=torch.float64)
        batched = torch.autograd.grad(value, (x, y), weights, is_grads_batched=True, retain_graph=True)
        for k, weight in enumerate(weights):
            for side, expected in zip(
                batched, torch.autograd.grad(value, (x, y), weight, retain_graph=True), strict=True
            ):
                torch.testing.assert_close(side[k], expected, rtol=1e-12, atol=1e-12)

    def test_jacobian(self, device: str, name: str) -> None:
        x, y = (side.detach() for side in inputs(device, torch.float64))
        jacobians = [
            torch.autograd.functional.jacobian(SEVERAL[name], (x, y), vectorize=vectorize)
            for vectorize in (False, True)
        ]
        for expected, side in zip(*jacobians, strict=True):
            torch.testing.assert_close(side, expected, rtol=1e-12, atol=1e-12)


class TestDeterminism:
    SHAPES = ((5, 200, 190, 3), (1, 700, 650, 2), (33, 40, 30, 20))

    @staticmethod
    def run(device: str, shape: tuple[int, int, int, int], options: dict[str, Any]) -> list[torch.Tensor]:
        batch, n, m, d = shape
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(batch, n, d, generator=generator).to(device).requires_grad_()
        y = torch.randn(batch, m, d, generator=generator).to(device).requires_grad_()
        value = softdtw(x, y, gamma=0.1, **options)
        value.sum().backward()
        return [value.detach(), x.grad, y.grad]

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("options", [{}, {"bandwidth": 60}, {"fused": False}])
    def test_two_runs_are_bitwise_equal(
        self, device: str, shape: tuple[int, int, int, int], options: dict[str, Any]
    ) -> None:
        for first, second in zip(
            self.run(device, shape, options), self.run(device, shape, options), strict=True
        ):
            assert torch.equal(first, second)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("options", [{}, {"bandwidth": 60}])
    def test_the_number_of_threads_does_not_matter(
        self, shape: tuple[int, int, int, int], options: dict[str, Any]
    ) -> None:
        threads = torch.get_num_threads()
        results = []
        try:
            for count in (1, 2, 3, 5):
                torch.set_num_threads(count)
                results.append(self.run("cpu", shape, options))
        finally:
            torch.set_num_threads(threads)
        for result in results[1:]:
            for first, second in zip(results[0], result, strict=True):
                assert torch.equal(first, second)

    def test_a_sample_does_not_depend_on_its_batch(self, device: str) -> None:
        x, y = (torch.randn(6, size, 5, device=device) for size in (150, 140))
        together = softdtw(x, y, gamma=0.1)
        for sample in range(6):
            assert torch.equal(softdtw(x[sample], y[sample], gamma=0.1), together[sample])


def test_several_threads_at_once(device: str) -> None:
    problems = []
    for size in (30, 90, 150, 210):
        x = torch.randn(4, size, 3, device=device, requires_grad=True)
        y = torch.randn(4, size - 5, 3, device=device, requires_grad=True)
        value = softdtw(x, y)
        problems.append((x, y, value.detach(), *torch.autograd.grad(value.sum(), (x, y))))

    def work(index: int) -> None:
        x, y, value, grad_x, grad_y = problems[index]
        for _ in range(10):
            again = softdtw(x, y)
            grads = torch.autograd.grad(again.sum(), (x, y))
            assert torch.equal(again, value)
            assert torch.equal(grads[0], grad_x)
            assert torch.equal(grads[1], grad_y)

    in_threads(work, len(problems))


class TestModule:
    def test_reductions(self, device: str) -> None:
        x, y = (side.detach() for side in inputs(device))
        values = SoftDTW(gamma=0.5)(x, y)
        assert torch.equal(values, softdtw(x, y, gamma=0.5))
        torch.testing.assert_close(SoftDTW(gamma=0.5, reduction="mean")(x, y), values.mean())
        torch.testing.assert_close(SoftDTW(gamma=0.5, reduction="sum")(x, y), values.sum())

    def test_options_and_lengths_reach_the_function(self, device: str) -> None:
        x, y = (side.detach() for side in inputs(device))
        options = {"gamma": 0.2, "bandwidth": 7, "normalize": True, "dist": "euclidean", "fused": False}
        measured = SoftDTW(**options)(x, y, [40, 7, 23], [35, 9, 20])
        expected = softdtw(x, y, **options, x_lengths=[40, 7, 23], y_lengths=[35, 9, 20])
        assert torch.equal(measured, expected)
        assert not torch.equal(measured, softdtw(x, y, **options | {"bandwidth": None}))

    def test_repr(self) -> None:
        assert repr(SoftDTW()) == "SoftDTW(gamma=1, dist='sqeuclidean', reduction='none')"
        module = SoftDTW(
            gamma=0.1, bandwidth=5, normalize=True, dist=torch.cdist, fused=False, reduction="sum"
        )
        assert repr(module) == (
            "SoftDTW(gamma=0.1, bandwidth=5, normalize=True, dist='cdist', fused=False, reduction='sum')"
        )

    def test_repr_with_a_module_as_distance(self) -> None:
        class Distance(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Linear(3, 3)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return torch.cdist(self.scale(x), self.scale(y))

        module = SoftDTW(dist=Distance())
        assert repr(module).splitlines() == [
            "SoftDTW(",
            "  gamma=1, dist='Distance', reduction='none'",
            "  (dist): Distance(",
            "    (scale): Linear(in_features=3, out_features=3, bias=True)",
            "  )",
            ")",
        ]
        assert len(list(module.parameters())) == 2
        with pytest.raises(ValueError, match="dist='Distance'"):
            SoftDTW(dist=Distance(), fused=True)

    @pytest.mark.parametrize(
        "clone",
        [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies(self, clone: Callable[[SoftDTW], SoftDTW]) -> None:
        x, y = torch.randn(2, 9, 3), torch.randn(2, 8, 3)
        module = SoftDTW(gamma=0.3, bandwidth=2, normalize=True, dist=torch.cdist, reduction="mean")
        module(x, y)
        assert repr(clone(module)) == repr(module)
        assert torch.equal(clone(module)(x, y), module(x, y))

    def test_it_has_nothing_to_save(self) -> None:
        module = SoftDTW(gamma=0.3)
        assert module.state_dict() == {}
        torch.save(module.state_dict(), io.BytesIO())

    def test_it_trains(self, device: str) -> None:
        """Gradient descent on the loss moves a series onto its target."""
        target = torch.sin(torch.linspace(0, 6, 30, device=device)).view(1, 30, 1)
        guess = torch.zeros(1, 30, 1, device=device, requires_grad=True)
        loss_fn = SoftDTW(gamma=0.01, normalize=True, reduction="mean")
        optimizer = torch.optim.Adam([guess], lr=0.1)
        start = loss_fn(guess, target).item()
        for _ in range(150):
            optimizer.zero_grad()
            loss = loss_fn(guess, target)
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.01 * start
