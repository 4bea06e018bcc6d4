"""The estimators: what scikit-learn demands, every form of series, results against the table of all pairs."""

from __future__ import annotations

import csv
import doctest
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import clustering
from softdtw_cuda import _barycenter_loss, _kmeans, distributed, estimators, softdtw_cdist, softdtw_knn
from softdtw_cuda._kmeans import Distances, Options, fill_empty, spread_start, stretched
from softdtw_cuda._processes import Processes, check_device
from softdtw_cuda.estimators import (
    SoftDTWKMeans,
    SoftDTWKNeighborsClassifier,
    SoftDTWKNeighborsRegressor,
    SoftDTWNearestCentroid,
)

ALL = [
    SoftDTWKMeans(n_clusters=3, gamma=0.3, max_iter=3, random_state=0),
    SoftDTWKNeighborsClassifier(2, gamma=0.3),
    SoftDTWKNeighborsRegressor(2, gamma=0.3),
    SoftDTWNearestCentroid(gamma=0.3, max_iter=3),
]
LENGTHS = [9, 12, 8, 12, 10, 11, 9, 12, 10]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The problems are small: a second thread only waits, and waiting is CPU time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


each_estimator = pytest.mark.parametrize("model", ALL, ids=lambda model: type(model).__name__)


CHECKS = [
    pytest.param(model, check, id=f"{type(model).__name__}-{check.func.__name__}{check.keywords or ''}")
    for estimator in (
        SoftDTWKMeans(max_iter=5),
        SoftDTWKNeighborsClassifier(),
        SoftDTWKNeighborsRegressor(),
        SoftDTWNearestCentroid(),
    )
    for model, check in estimator_checks_generator(estimator)
]


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_what_scikit_learn_demands(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("name", estimators.__all__)
def test_examples(name: str) -> None:
    names = {"np": np, **{public: getattr(estimators, public) for public in estimators.__all__}}
    runner = doctest.DocTestRunner()
    tests = doctest.DocTestFinder().find(getattr(estimators, name), name, globs=names)
    assert any(test.examples for test in tests)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def kinds(count: int = 6, steps: int = 12, features: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rising and falling series (n, steps, features) that are shifted in time, and which is which."""
    random = np.random.RandomState(seed)
    time = np.linspace(0, 3, steps) + random.uniform(-0.5, 0.5, (count, 1))
    y = np.arange(count) % 2
    series = np.where(y[:, None] == 0, 1, -1) * np.tanh(2 * time - 3)
    X = np.repeat(series[:, :, None], features, 2) + 0.05 * random.randn(count, steps, features)
    return X, y


def forms(X: np.ndarray) -> dict[str, Any]:
    """The same series, (n, steps, 1), in every form."""
    tensor = torch.from_numpy(X)
    return {
        "2-D array": X[:, :, 0],
        "3-D array": X,
        "list of arrays": list(X),
        "list of 1-D arrays": list(X[:, :, 0]),
        "list of lists": X[:, :, 0].tolist(),
        "object array": np.array([*X[:, :, 0], None], dtype=object)[:-1],
        "2-D tensor": tensor[:, :, 0],
        "3-D tensor": tensor,
        "list of tensors": list(tensor),
    }


def as_array(result: Any) -> np.ndarray:
    return result.numpy() if isinstance(result, torch.Tensor) else np.asarray(result)


@each_estimator
def test_every_form_gives_the_same_and_results_come_in_kind(model: Any) -> None:
    X, y = kinds()
    results = {}
    for form, given in forms(X).items():
        fitted = clone(model).fit(given, y)
        answers = [fitted.predict(given)]
        for method in ("transform", "predict_proba", "kneighbors"):
            if hasattr(fitted, method):
                answer = getattr(fitted, method)(given)
                answers += answer if isinstance(answer, tuple) else [answer]
        answers += [getattr(fitted, name) for name in ("labels_",) if hasattr(fitted, name)]
        is_tensor = "tensor" in form
        assert all(isinstance(each, torch.Tensor if is_tensor else np.ndarray) for each in answers), form
        two_d = form in ("2-D array", "2-D tensor", "list of lists")
        for name in ("cluster_centers_", "centroids_"):
            if hasattr(fitted, name):
                centers = getattr(fitted, name)
                assert isinstance(centers, torch.Tensor if is_tensor else np.ndarray)
                assert centers.shape[1:] == ((12,) if two_d else (12, 1))
        assert fitted.n_features_in_ == (12 if two_d else 1)
        results[form] = [as_array(each) for each in answers]
    for form, answers in results.items():
        for found, expected in zip(answers, results["3-D array"], strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=form)


@each_estimator
def test_lengths_may_differ_between_series_and_from_those_of_fit(model: Any) -> None:
    X, y = kinds(9)
    ragged = [one[:n] for one, n in zip(X, LENGTHS, strict=True)]
    fitted = clone(model).fit(ragged, y)
    alone = np.concatenate([fitted.predict([one]) for one in ragged])
    np.testing.assert_array_equal(alone, fitted.predict(ragged))
    padded = [np.concatenate([one, np.full((4, 1), 99.0)])[: len(one)] for one in ragged]
    np.testing.assert_array_equal(fitted.predict(padded), alone)
    longer = fitted.predict(np.repeat(X, 2, axis=1))
    assert longer.shape == (9,)


@each_estimator
def test_float32_stays_float32(model: Any) -> None:
    X, y = kinds()
    fitted = clone(model).fit(X.astype(np.float32), y.astype(np.float32))
    for name in ("cluster_centers_", "centroids_"):
        if hasattr(fitted, name):
            assert getattr(fitted, name).dtype == np.float32
    if hasattr(fitted, "kneighbors"):
        assert fitted.kneighbors(X)[0].dtype == np.float32
    half = torch.from_numpy(X).to(torch.bfloat16)
    assert clone(model).fit(half, y).predict(half).shape == (6,)


@each_estimator
def test_not_where_torch_makes_tensors_by_default(model: Any) -> None:
    X, y = kinds(features=2)
    expected = clone(model).fit(X, y).predict(X)
    torch.set_default_device("meta")
    try:
        found = clone(model).fit(X, y).predict(X)
    finally:
        torch.set_default_device(None)
    np.testing.assert_array_equal(found, expected)


@each_estimator
def test_pickle_and_clone(model: Any) -> None:
    X, y = kinds(features=2)
    fitted = clone(model).fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    fresh = clone(fitted)
    assert fresh.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(X)


# ---- neighbours


@pytest.mark.parametrize("normalize", [False, True])
def test_neighbours_are_those_of_the_table(normalize: bool) -> None:
    X, y = kinds(12, features=2)
    train, queries = X[:8], X[8:, :10]
    options = {"gamma": 0.3, "bandwidth": 5, "normalize": normalize}
    model = SoftDTWKNeighborsClassifier(3, **options).fit(train, y[:8])
    table = softdtw_cdist(queries, train, **options)
    order = np.argsort(table, axis=1, kind="stable")
    values, indices = model.kneighbors(queries)
    np.testing.assert_array_equal(indices, order[:, :3])
    np.testing.assert_array_equal(values, np.take_along_axis(table, order[:, :3], 1))
    np.testing.assert_array_equal(model.kneighbors(queries, 1, return_distance=False), order[:, :1])
    votes = np.stack([(y[:8][order[:, :3]] == k).mean(1) for k in (0, 1)], 1)
    np.testing.assert_allclose(model.predict_proba(queries), votes)
    np.testing.assert_array_equal(model.predict(queries), votes.argmax(1))


def test_neighbours_of_the_fitted_series_leave_out_themselves() -> None:
    X, y = kinds(7)
    model = SoftDTWKNeighborsRegressor(2, gamma=0.3).fit(X, y)
    values, indices = model.kneighbors()
    table = softdtw_cdist(X, gamma=0.3, normalize=True)
    np.fill_diagonal(table, np.inf)
    order = np.argsort(table, axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(table, order, 1))
    with pytest.raises(ValueError, match=r"n_neighbors = 7, n_samples_fit = 6"):
        model.kneighbors(n_neighbors=7)


def test_weights_are_inverse_distances_and_a_neighbour_at_zero_counts_alone() -> None:
    X, _ = kinds(8)
    target = np.random.RandomState(1).randn(6, 2)
    model = SoftDTWKNeighborsRegressor(3, weights="distance", gamma=0.3).fit(X[:6], target)
    values, indices = model.kneighbors(X[6:])
    expected = ((1 / values)[:, :, None] * target[indices]).sum(1) / (1 / values).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict(X[6:]), expected)
    np.testing.assert_array_equal(model.predict(X[:6]), target)
    classes = SoftDTWKNeighborsClassifier(3, weights="distance", gamma=0.3).fit(X[:6], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(classes.predict(X[:6]), [0, 0, 0, 1, 1, 1])
    assert (SoftDTWKNeighborsRegressor(3, gamma=0.3).fit(X[:6], target).predict(X[:6]) != target).any()


def test_labels_that_are_no_numbers() -> None:
    X, y = kinds()
    names = np.array(["up", "down"])[y]
    for model in (SoftDTWKNeighborsClassifier(1, gamma=0.3), SoftDTWNearestCentroid(gamma=0.3)):
        model.fit(torch.from_numpy(X), names)
        np.testing.assert_array_equal(model.predict(torch.from_numpy(X)), names)
        assert model.score(torch.from_numpy(X), names) == 1.0


# ---- centers


def test_the_nearest_centroid_is_that_of_the_table() -> None:
    X, y = kinds(10, features=2)
    model = SoftDTWNearestCentroid(gamma=0.3).fit(X[:8], y[:8])
    table = softdtw_cdist(X, model.centroids_, gamma=0.3, normalize=True)
    np.testing.assert_array_equal(model.predict(X), table.argmin(1))
    assert model.score(X, y) == 1.0
    assert model.n_iter_ >= 1


@pytest.mark.parametrize("normalize", [False, True])
def test_k_means_finds_two_kinds(normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = kinds(20, features=2)
    model = SoftDTWKMeans(2, gamma=0.3, normalize=normalize, random_state=0).fit(X)
    agree = (model.labels_ == y).mean()
    assert agree in (0.0, 1.0)
    table = softdtw_cdist(X, model.cluster_centers_, gamma=0.3, normalize=normalize)
    np.testing.assert_array_equal(model.transform(X), table)
    np.testing.assert_array_equal(model.predict(X), model.labels_)
    np.testing.assert_array_equal(model.labels_, table.argmin(1))
    assert model.inertia_ == pytest.approx(table.min(1).sum(), rel=1e-12)
    assert model.score(X) == -model.inertia_
    assert 1 <= model.n_iter_ < 50
    monkeypatch.setattr(_kmeans, "PAIRS_OF_A_TILE", 7)  # three series
    again = SoftDTWKMeans(2, gamma=0.3, normalize=normalize, random_state=0).fit(X)
    np.testing.assert_array_equal(again.cluster_centers_, model.cluster_centers_)
    np.testing.assert_array_equal(again.transform(X), table)


def test_centers_come_as_an_array_a_tensor_or_a_list() -> None:
    X, _ = kinds()
    fits = [
        SoftDTWKMeans(2, init=given, gamma=0.3, max_iter=1, device="cpu").fit(X)
        for given in (X[:2], torch.from_numpy(X[:2]), [*X[:2]], [*torch.from_numpy(X[:2])], X[:2].tolist())
    ]
    for one in fits[1:]:
        np.testing.assert_array_equal(one.cluster_centers_, fits[0].cluster_centers_)


def noisy(count: int = 30, seed: int = 3) -> np.ndarray:
    """Random walks: no clusters, so that k-means has work for many rounds."""
    return np.random.RandomState(seed).randn(count, 16).cumsum(1)


def test_every_round_lowers_the_inertia() -> None:
    X = noisy()
    start = X[:4]
    inertia = [
        SoftDTWKMeans(4, init=start, max_iter=rounds, tol=0, gamma=0.5).fit(X).inertia_
        for rounds in range(1, 7)
    ]
    assert all(after <= before for before, after in itertools.pairwise(inertia))
    assert (
        inertia[-1]
        < inertia[0]
        < softdtw_cdist(X[:, :, None], start[:, :, None], gamma=0.5, normalize=True).min(1).sum()
    )
    assert SoftDTWKMeans(4, init=start, tol=0.5, gamma=0.5).fit(X).n_iter_ < 6


def test_the_best_of_several_runs_is_kept() -> None:
    X = noisy()
    state = np.random.RandomState(5)
    options = {"n_clusters": 4, "init": "random", "max_iter": 2, "gamma": 0.5}
    single = [SoftDTWKMeans(random_state=state, **options).fit(X).inertia_ for _ in range(4)]
    assert len(set(single)) > 1
    best = SoftDTWKMeans(n_init=4, random_state=np.random.RandomState(5), **options).fit(X)
    assert best.inertia_ == min(single)


def test_starts_follow_the_seed() -> None:
    X = noisy()
    fits = [SoftDTWKMeans(4, max_iter=1, gamma=0.5, random_state=seed).fit(X) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(fits[0].cluster_centers_, fits[1].cluster_centers_)
    assert (fits[0].cluster_centers_ != fits[2].cluster_centers_).any()


def test_spread_starts_take_one_series_of_each_kind() -> None:
    """Three kinds, far from each other, of unequal number: draws alike would miss one now and then."""
    X = torch.cat([torch.full((count, 6, 1), at) for count, at in ((27, 0.0), (2, 50.0), (1, -50.0))])
    X = X + 0.01 * torch.randn(X.shape, generator=torch.Generator().manual_seed(0))
    distances = Distances(X, None, 6, Options(0.1, None, True, "sqeuclidean"))
    for seed in range(20):
        centers = spread_start(distances, X, None, 3, 6, np.random.RandomState(seed))
        assert sorted((centers.mean((1, 2)) / 50).round().tolist()) == [-1.0, 0.0, 1.0]


def test_an_empty_cluster_starts_from_the_farthest_series() -> None:
    labels, values = np.array([0, 0, 2, 2, 2]), np.array([1.0, 5.0, 9.0, 8.0, 0.0])
    assert fill_empty(labels, values, 5) == [(1, 2), (3, 3), (4, 1)]
    np.testing.assert_array_equal(labels, [0, 4, 1, 3, 2])
    X = noisy(6)
    far = np.stack([X[0], X[0] + 1000.0, X[0] - 1000.0])  # nothing is near to the last two
    model = SoftDTWKMeans(3, init=far, max_iter=3, gamma=0.5).fit(X)
    assert set(model.labels_) == {0, 1, 2}


def test_as_many_clusters_as_series() -> None:
    X, _ = kinds(5)
    model = SoftDTWKMeans(5, gamma=0.1, random_state=0).fit(X)
    assert sorted(model.labels_) == [0, 1, 2, 3, 4]
    assert model.inertia_ == pytest.approx(0, abs=1e-6)


def test_centers_of_unequal_series_have_their_mean_length() -> None:
    X, _ = kinds(9)
    ragged = [one[:n] for one, n in zip(X, LENGTHS, strict=True)]
    model = SoftDTWKMeans(2, gamma=0.3, random_state=0).fit(ragged)
    assert model.cluster_centers_.shape == (2, round(sum(LENGTHS) / 9), 1)
    assert SoftDTWKMeans(2, init=np.zeros((2, 5, 1)), gamma=0.3).fit(ragged).cluster_centers_.shape == (
        2,
        5,
        1,
    )
    line = stretched(torch.arange(8.0).view(1, 8, 1), [5], np.array([0]), 9)
    torch.testing.assert_close(line, torch.linspace(0, 4, 9).view(1, 9, 1))


@pytest.mark.gpu
@each_estimator
def test_a_gpu_finds_what_the_cpu_finds(model: Any) -> None:
    X, y = kinds(12)
    X = X.astype(np.float32)
    found = clone(model).set_params(device="cuda").fit(X, y)
    expected = clone(model).set_params(device="cpu").fit(X, y)
    np.testing.assert_array_equal(found.predict(X), expected.predict(X))
    for name in ("cluster_centers_", "centroids_"):
        if hasattr(found, name):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-3)
    on_gpu = torch.from_numpy(X).cuda()
    there = clone(model).fit(on_gpu, y)
    assert there.predict(on_gpu).device.type == "cuda"
    np.testing.assert_array_equal(there.predict(on_gpu).cpu(), found.predict(X))
    np.testing.assert_array_equal(there.predict(X), found.predict(X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).predict(X), found.predict(X))


# ---- scikit-learn's tools


def last_axis(X: np.ndarray) -> np.ndarray:
    return X[:, :, None]


def test_pipelines_searches_and_cross_validation() -> None:
    X, y = kinds(18)
    flat = X[:, :, 0]
    pipe = make_pipeline(StandardScaler(), FunctionTransformer(last_axis), SoftDTWKNeighborsClassifier(1))
    search = GridSearchCV(pipe, {"softdtwkneighborsclassifier__gamma": [0.1, 1.0]}, cv=3).fit(flat, y)
    assert search.best_score_ == 1.0
    pipe = make_pipeline(SoftDTWKMeans(2, gamma=0.3, random_state=0), SoftDTWKNeighborsClassifier(1))
    assert pipe.fit(flat, y).score(flat, y) == 1.0
    assert list(pipe[0].get_feature_names_out()) == ["softdtwkmeans0", "softdtwkmeans1"]
    for form, given in forms(X).items():
        scores = cross_val_score(SoftDTWKNeighborsClassifier(1, gamma=0.3), given, y, cv=3)
        np.testing.assert_array_equal(scores, 1.0, err_msg=form)
    scores = cross_val_score(
        SoftDTWKNeighborsClassifier(1, gamma=0.3), torch.from_numpy(X), y, cv=3, scoring="accuracy"
    )
    np.testing.assert_array_equal(scores, 1.0)
    target = torch.from_numpy(y)
    assert SoftDTWNearestCentroid(gamma=0.3).fit(torch.from_numpy(X), target).score(X, target) == 1.0
    assert cross_val_score(SoftDTWKMeans(2, max_iter=2), X, cv=2).shape == (2,)


# ---- errors


ERRORS: list[tuple[Callable[[np.ndarray], object], type[Exception], str]] = [
    (lambda X: SoftDTWKMeans(7).fit(X), ValueError, "n_samples=6 should be >= n_clusters=7"),
    (lambda X: SoftDTWKMeans(0).fit(X), ValueError, "n_clusters must be at least 1"),
    (lambda X: SoftDTWKMeans(2, n_init=0).fit(X), ValueError, "n_init must be at least 1"),
    (lambda X: SoftDTWKMeans(2, tol=-1.0).fit(X), ValueError, "tol"),
    (lambda X: SoftDTWKMeans(2, gamma=0.0).fit(X), ValueError, "gamma"),
    (lambda X: SoftDTWKMeans(2, bandwidth=-3).fit(X), ValueError, "bandwidth"),
    (lambda X: SoftDTWKMeans(2, dist="no").fit(X), ValueError, "dist"),
    (lambda X: SoftDTWKMeans(2, normalize="yes").fit(X), TypeError, "normalize must be True or False"),
    (lambda X: SoftDTWKMeans(2, device="abacus").fit(X), ValueError, "device is 'abacus', expected 'cpu'"),
    (lambda X: SoftDTWKMeans(2, init="k-means").fit(X), ValueError, "init is 'k-means'"),
    (lambda X: SoftDTWKMeans(2, init=X[:3]).fit(X), ValueError, r"init has shape \(3, 12, 2\)"),
    (lambda X: SoftDTWKMeans(2, init=X[:2, :, 0]).fit(X), ValueError, r"init has shape \(2, 12\)"),
    (lambda X: SoftDTWKMeans(2).fit(X[:0]), ValueError, "0 sample"),
    (lambda X: SoftDTWKMeans(2).fit(torch.from_numpy(X[:0])), ValueError, r"0 sample\(s\)"),
    (lambda X: SoftDTWKMeans(2).fit(X[:, :0]), ValueError, "no size being 0"),
    (lambda X: SoftDTWKMeans(2).fit(X[..., None]), ValueError, r"shape \(6, 12, 2, 1\)"),
    (lambda X: SoftDTWKMeans(2).fit(torch.from_numpy(X)[0, 0]), ValueError, r"shape \(2,\)"),
    (lambda X: SoftDTWKMeans(2).fit(X + np.inf), ValueError, "Input X contains infinity"),
    (lambda X: SoftDTWKMeans(2).fit(torch.from_numpy(X) * torch.nan), ValueError, "Input X contains NaN"),
    (lambda X: SoftDTWKMeans(2).fit(torch.from_numpy(X) + torch.inf), ValueError, "contains infinity"),
    (lambda X: SoftDTWKMeans(2).fit([*X[:4], X[0] * np.nan]), ValueError, "Input X contains NaN"),
    (lambda X: SoftDTWKMeans(2).fit(torch.from_numpy(X) + 1j), ValueError, "Complex data not supported"),
    (lambda X: SoftDTWKMeans(2).fit([X[0], X[1][:, :1]]), ValueError, r"X\[1\] has shape \(12, 1\)"),
    (lambda X: SoftDTWKMeans(2).fit([X[0], np.array(["a", "b"])]), ValueError, r"X\[1\] has shape \(2,\)"),
    (lambda X: SoftDTWKMeans(2).fit(X).predict(X[:, :, :1]), ValueError, "X has 1 features in each"),
    (
        lambda X: SoftDTWKMeans(2).fit(X[:, :, 0]).predict(X[:, :9, 0]),
        ValueError,
        r"X has 9 features, .* \(n, steps, 1\)",
    ),
    (lambda X: SoftDTWKNeighborsClassifier(weights="far").fit(X, range(6)), ValueError, "weights is 'far'"),
    (
        lambda X: SoftDTWKNeighborsClassifier(weights="distance", normalize=False).fit(X, range(6)),
        ValueError,
        "may be negative",
    ),
    (lambda X: SoftDTWKNeighborsClassifier(7).fit(X, range(6)).predict(X), ValueError, "n_neighbors = 7"),
    (lambda X: SoftDTWKNeighborsClassifier().fit(X, range(5)), ValueError, r"\[6, 5\]"),
    (lambda X: SoftDTWNearestCentroid().fit(X, range(5)), ValueError, r"\[6, 5\]"),
    (lambda X: SoftDTWKMeans(2, init=[X[0], X[1, :9]]).fit(X), ValueError, r"centers of shapes \(9, 2\) and"),
    (lambda X: SoftDTWKMeans(2, init=[X[0]]).fit(X), ValueError, r"init has shape \(1, 12, 2\)"),
    (lambda X: SoftDTWKMeans(2, device="meta").fit(X), ValueError, "device is 'meta', but torch cannot"),
    (lambda X: SoftDTWNearestCentroid().fit(X, None), ValueError, "requires y"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: Callable[[np.ndarray], object], kind: type[Exception], message: str) -> None:
    X, _ = kinds(features=2)
    with pytest.raises(kind, match=message):
        call(X)


def test_a_gpu_without_a_number_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    set_of = SoftDTWKMeans()._check_fit_set(np.zeros((3, 4)))
    for rank, index in ((None, 1), ("2", 2), ("7", 3)):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        own = torch.device("cuda", index)
        assert check_device("cuda") == check_device(torch.device("cuda")) == own
        assert distributed._device_of(np.zeros((3, 4, 1)), "cuda") == own
        assert SoftDTWKMeans(device="cuda")._device_of(set_of) == own
    assert check_device("cuda:3") == torch.device("cuda:3")
    with pytest.raises(ValueError, match=r"device is 'cuda:4', but torch finds 4 GPU\(s\) here"):
        check_device("cuda:4")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    X, y = kinds()
    for call in (
        lambda: distributed.cdist(X, device="cuda"),
        lambda: distributed.knn(X, None, 1, device="cuda:0"),
        lambda: softdtw_knn(X, None, 1, device="cuda"),
        lambda: SoftDTWKMeans(2, device="cuda").fit(X),
        lambda: SoftDTWKNeighborsClassifier(1, device="cuda").fit(X, y).predict(X),
    ):
        with pytest.raises(ValueError, match=r"device is 'cuda.*', but torch finds no GPU here"):
            call()


# ---- several processes


def ragged_walks() -> list[np.ndarray]:
    random = np.random.RandomState(2)
    return [random.randn(random.randint(5, 12), 2).cumsum(0).astype(np.float32) for _ in range(60)]


def divided_fit(normalize: bool) -> list[np.ndarray]:
    """What a fit over all processes found, from two starts, with groups small enough to divide."""
    _barycenter_loss.SERIES_OF_A_GROUP = 4
    model = SoftDTWKMeans(
        3, n_init=2, max_iter=3, gamma=0.5, normalize=normalize, random_state=0, distributed=True
    )
    model.fit(ragged_walks())
    return [model.cluster_centers_, model.labels_, np.array([model.inertia_, model.n_iter_])]


def fit_process(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting{processes}", rank=rank, world_size=processes
    )
    try:
        found = [divided_fit(normalize) for normalize in (True, False)]
        torch.save(found, f"{folder}/{processes}-{rank}.pt")
        if processes > 1:
            with pytest.raises((ValueError, RuntimeError), match="random_state is None, expected an integer"):
                SoftDTWKMeans(2, distributed=True).fit(ragged_walks())
            names = r"process 1 was called with something else than process 0: inputs: x: content"
            model = SoftDTWKMeans(2, distributed=True, random_state=0)
            other = [one + (rank == 1) for one in ragged_walks()]
            with pytest.raises((ValueError, RuntimeError), match=names):
                model.fit(other)
            with pytest.raises((ValueError, RuntimeError), match=r"n_samples=1 should be >= n_clusters=2"):
                model.fit(ragged_walks()[: 1 if rank == 1 else None])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_any_number_of_processes_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also what a process without a group finds."""
    monkeypatch.setattr(_barycenter_loss, "SERIES_OF_A_GROUP", 4)
    expected = [divided_fit(normalize) for normalize in (True, False)]
    for processes in (1, 2, 3, 4):
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            fit_process, (processes, str(tmp_path)), processes
        )
        for rank in range(processes):
            found = torch.load(tmp_path / f"{processes}-{rank}.pt", weights_only=False)
            for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_shares_of_processes_have_as_much_work_each() -> None:
    work = torch.tensor([5, 1, 1, 1, 8, 2, 2, 4])
    for count in (1, 2, 3, 4, 11):
        shares = Processes(0, count).divide(work)
        assert len(shares) == count
        assert [row for share in shares for row in range(share.start, share.stop)] == list(range(8))
        for share in shares:
            assert int(work[share].sum()) <= 24 / count + 8
    assert Processes(0, 2).divide(work) == [slice(0, 4), slice(4, 8)]


def test_small_sets_open_no_parallel_region_of_torch() -> None:
    """On a busy machine such a call waits milliseconds for the other thread, for microseconds of work."""
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            large = isinstance(result, torch.Tensor) and result.numel() > 4096
            called.append(f"{func}{', large' if large else ''}")
            return result

    X, _ = kinds(60, 90)
    with Record():  # type: ignore[no-untyped-call]  # torch does not annotate its __init__
        SoftDTWKMeans(3, gamma=0.3, max_iter=2, init=X[:3], device="cpu").fit(X)
    assert "aten.index_select.default, large" in called
    assert not {"aten.repeat_interleave.Tensor", "aten.min.dim", "aten.index.Tensor, large"} & set(called)


# ---- the benchmark


def test_clustering_measures_and_says_what_is_not_installed() -> None:
    rows = [*clustering.pair_rows((9, 12)), *clustering.k_means_rows(clustering.SMALL)]
    own = [row for row in rows if row.method.startswith(clustering.OWN)]
    assert [row.status for row in own] == ["ok"] * 3
    assert all(float(row.seconds) > 0 for row in own)
    for row in rows:
        assert row.status == "ok" or row.status.startswith("not installed: ")
    x = clustering.SMALL.data()
    best = float(own[-1].inertia)
    start = softdtw_cdist(x[:, :, None].astype(np.float64), x[:2, :, None].astype(np.float64)).min(1).sum()
    assert best < start


def test_a_run_replaces_jobs_of_other_sizes(tmp_path: Path) -> None:
    path = tmp_path / "clustering.csv"

    def write(*jobs: str, only: str | None = None) -> list[str]:
        rows = [clustering.Row(job, clustering.OWN, "1", "1", "", "ok") for job in jobs]
        clustering.write(rows, only, path)
        with path.open(newline="") as file:
            return [row["job"] for row in csv.DictReader(file)]

    assert write("all pairs of 5", "k-means, 100") == ["all pairs of 5", "k-means, 100"]
    assert write("k-means, 500", only="k-means") == ["all pairs of 5", "k-means, 500"]
    assert write("all pairs of 7", "k-means, 70") == ["all pairs of 7", "k-means, 70"]
