"""Hundreds of random legal calls on four ranks: right, and nothing grows.

    python benchmarks/soak.py                  # 500 calls, 4 ranks, tiny random models
    python benchmarks/soak.py --calls 100 --ranks 2 --seed 1

Each object serves ten calls of random shapes, batches, prompts, steps and guidance; then it is closed and another
layout and model follow, while one object made at the start stays open and is called now and then. All ranks must give
the same bits; every tenth call is compared with one process (PipeFusion: with one process that has the same patches and
warm-up). A call may be refused by all ranks alike (more ranks than pictures, say) and is then drawn again. Memory,
threads and open files of every rank are read after a garbage collection once per object.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workers import Workers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

TOLERANCE = 2e-5
PER_OBJECT = 10
_ranks: dict[str, Any] = {}


@dataclass
class Result:
    """One rank's account."""

    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    objects: int = 0
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)


def start(limit: float) -> None:
    """Make the object that stays open."""
    import torch

    from tests.tiny_models import pipeline
    from xpar import EngineConfig, Parallel

    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    config = EngineConfig(timeout=limit, ulysses_degree=world)
    _ranks["lasting"] = Parallel(pipeline("flux"), config)
    _ranks["result"] = Result()


def serve(seed: int, calls: int, limit: float) -> tuple[Result, Any, Any]:
    """One more object and its calls; every rank draws the same. Gives the last call and its picture too."""
    import torch.distributed as dist

    from tests.random_calls import draw_call, draw_case
    from tests.tiny_models import pipeline
    from xpar import ConfigError, EngineConfig, Parallel, UnsupportedError

    rng = random.Random(seed)
    case = draw_case(rng, dist.get_world_size())
    result: Result = _ranks["result"]
    made = False
    while not made:  # a layout that this model cannot take is refused when it is wrapped
        try:
            parallel = Parallel(
                pipeline(case.family, case.heads, case.layers), EngineConfig(timeout=limit, **case.fields)
            )
            made = True
        except (ConfigError, UnsupportedError):
            result.refused += 1
            case = draw_case(rng, dist.get_world_size())
    with parallel:
        done, last = 0, (None, None)
        while done < calls:
            # fewer pictures than the layout needs would be refused, all that are drawn
            case = replace(case, call=draw_call(rng, case.family, pictures=case.fields.get("dp_degree", 1)))
            begin = time.perf_counter()
            try:
                picture = parallel(**case.arguments())[0]
            except ConfigError:
                result.refused += 1
                continue
            except UnsupportedError:  # found out half-way: the object is broken then
                result.refused += 1
                break
            result.seconds.append(time.perf_counter() - begin)
            done, last = done + 1, (case, picture)
            _compare_ranks(result, case, picture)
    _ranks["lasting"](**_lasting_arguments())
    result.objects += 1
    _read_resources(result)
    return result, *last


def _lasting_arguments() -> dict[str, Any]:
    from tests.tiny_models import call_arguments

    return call_arguments("flux", steps=1)


def _compare_ranks(result: Result, case: Any, picture: Any) -> None:
    """Same bits on all ranks."""
    import torch
    import torch.distributed as dist

    digest = hashlib.sha256(torch.as_tensor(picture).numpy().tobytes()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        result.right += 1
    else:
        result.wrong.append(f"the ranks differ: {case}")


@dataclass
class Comparison:
    """With one process."""

    count: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Any, picture: Any, expected: Any) -> None:
        """Compare one more picture."""
        import torch

        from tests.tiny_models import relative_error

        error = relative_error(torch.as_tensor(picture).float(), torch.as_tensor(expected).float())
        self.count += 1
        self.worst = max(self.worst, error)
        if not error < TOLERANCE:
            self.wrong.append(f"relative error {error:.1e}: {case}")


def _read_resources(result: Result) -> None:
    import psutil

    gc.collect()
    process = psutil.Process()
    result.megabytes.append(process.memory_info().rss / 2**20)
    result.threads.append(process.num_threads())
    result.descriptors.append(process.num_fds())


def growth(values: list[Any]) -> str:
    """Medians of the second and the last fifth: the first holds what is loaded once."""
    fifth = max(1, len(values) // 5)
    early, late = statistics.median(values[fifth : 2 * fifth] or values), statistics.median(values[-fifth:])
    return f"{early:.0f} -> {late:.0f}"


def main() -> None:
    """Run the calls and write the account."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120, help="seconds until a call counts as hung")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    args = parser.parse_args()
    from tests.random_calls import answer

    begin = time.monotonic()
    compared = Comparison()
    with (
        Workers(args.ranks, threads=1, limit=args.limit * 3) as workers,
        Workers(1, threads=1, limit=args.limit) as one,
    ):
        workers.call(start, args.limit)
        results: list[Result] = []
        number = 0
        while not results or results[0].right + len(results[0].wrong) < args.calls:
            answers = workers.call(serve, 1000 * args.seed + number, PER_OBJECT, args.limit)
            results = [result for result, _, _ in answers]
            _, case, picture = answers[0]
            if case is not None:
                compared.add(case, picture, one.call(answer, case, case.reference_fields)[0])
            number += 1
            if number % 10 == 0:
                print(f"{results[0].right} calls, {time.monotonic() - begin:.0f} s", flush=True)
    lines = _summary(results, compared, time.monotonic() - begin)
    print("\n".join(lines))
    args.output.write_text(json.dumps({"summary": lines, "ranks": [asdict(r) for r in results]}) + "\n")
    sys.exit(bool(results[0].wrong or compared.wrong))


def _summary(results: list[Result], compared: Comparison, seconds: float) -> list[str]:
    first = results[0]
    total = first.right + len(first.wrong)
    right = total - len(first.wrong) - len(compared.wrong)
    return [
        f"{right} of {total} calls right on {len(results)} ranks: all ranks equal to the bit, {compared.count} of them "
        f"compared with one process, largest relative error {compared.worst:.1e}",
        f"{first.objects} objects made and closed; {first.refused} calls or layouts refused by all ranks alike",
        f"median call {statistics.median(first.seconds):.3f} s; {seconds:.0f} s in all",
        *(
            f"rank {rank}: resident {growth(r.megabytes)} MB, threads {growth(r.threads)}, "
            f"open files {growth(r.descriptors)}"
            for rank, r in enumerate(results)
        ),
        *first.wrong,
        *compared.wrong,
    ]


if __name__ == "__main__":
    main()
