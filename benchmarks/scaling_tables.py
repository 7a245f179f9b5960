"""The tables of docs/scaling.md, computed from the formulas."""

from scaling_formulas import (
    Engine,
    HeadCase,
    Model,
    Step,
    chosen_way,
    gathered,
    head_held,
    head_received,
    rows_received,
    step_held,
    step_received,
)

RANKS = (8, 64, 1024)
VOCABULARIES = (32000, 151936)
TOKENS = 4096
TENSOR = 8
QWEN3_8B = Model(36, 4096, 12288, 151936, 4096, 1024, tied=False, norms_of_heads=256)
ENGINES: tuple[Engine, ...] = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "TP", "TP x FSDP2")


def tables() -> str:
    """Return all tables in Markdown."""
    return "\n\n".join([crossings(), head_table(), held_table(), step_table(), rows_table()])


def head_table() -> str:
    rows = []
    for vocabulary in VOCABULARIES:
        cells = []
        for ranks in RANKS:
            case = HeadCase(ranks, TOKENS, QWEN3_8B.hidden, vocabulary)
            local, weight = (_mib(head_received(case, way)) for way in ("local", "in turn"))
            cells.append(f"**{local}** / {weight}" if chosen_way(case) == "local" else f"{local} / **{weight}**")
        rows.append([f"V {vocabulary}", *cells])
    return _table(f"{TOKENS} scored tokens per rank: MiB received, local / in turn", RANKS, rows)


def held_table() -> str:
    rows = []
    for way in ("local", "in turn", "whole"):
        cases = [HeadCase(ranks, TOKENS, QWEN3_8B.hidden, QWEN3_8B.vocabulary) for ranks in RANKS]
        rows.append([way, *(_mib(x.weight / x.ranks + head_held(x, way)) for x in cases)])
    return _table(f"{TOKENS} scored tokens per rank: MiB held for the head, own rows included", RANKS, rows)


def step_table() -> str:
    rows = []
    for lora in (0, 16):
        for engine in ENGINES:
            if lora and "ZeRO" in engine:
                continue  # ZeRO-1 and 2 as DDP, ZeRO-3 as FSDP2, within a few percent
            cells = [_of_step(QWEN3_8B, engine, ranks, lora) for ranks in RANKS]
            rows.append([f"{engine}, {'LoRA' if lora else 'full'}", *cells])
    return _table("Optimizer step: GiB received / held", RANKS, rows)


def rows_table() -> str:
    rows = []
    for name, more in (("ids and masks", {}), ("with log-probs of a sampler", {"per_token": 9, "entries": 6})):
        cells = [" / ".join(f"{x / 2**20:.2f}" for x in rows_received(ranks, 32, 1024, **more)) for ranks in RANKS]
        rows.append([name, *cells])
    return _table("Rows between ranks: MiB received, rows / numbers", RANKS, rows)


def whole_step(model: Model, engine: Engine, ranks: int, lora: int) -> tuple[float, float]:
    """Return the bytes that a rank receives and holds in a step of one micro-batch with `TOKENS` tokens, all scored."""
    step = Step(ranks, TOKENS, lora, tensor=TENSOR)
    case = HeadCase(ranks, TOKENS, model.hidden, model.vocabulary, trained=not lora)
    moved, held = step_received(model, step, engine), step_held(model, step, engine)
    if engine in ("DDP", "ZeRO-1", "ZeRO-2"):
        return moved, held + head_held(case, "here") - _gradient(case, 1)
    if engine in ("FSDP2", "ZeRO-3"):
        # With adapters the head is frozen, and its rows stay sharded. FSDP2 and DeepSpeed gather a trained head;
        # DeepSpeed in the forward and again in the backward
        way = chosen_way(case) if lora else "whole"
        again = gathered(ranks, case.weight) if engine == "ZeRO-3" and not lora else 0
        return moved + head_received(case, way) + again, held + head_held(case, way)
    tensor = ranks if engine == "TP" else TENSOR
    in_group = HeadCase(tensor, TOKENS, model.hidden, model.vocabulary, trained=not lora)
    moved += head_received(in_group, "tensor parallel")
    held += head_held(in_group, "tensor parallel") - _gradient(in_group, tensor)
    if engine == "TP x FSDP2":
        share = case.weight / tensor
        moved += gathered(ranks // tensor, share * (1 if lora else 2))
        held += share if ranks > tensor else 0
    return moved, held


def _gradient(case: HeadCase, ranks: int) -> float:
    """Return the bytes of the gradient of a rank's rows, which the step's gradients count too."""
    return case.weight / ranks if case.trained else 0


def _of_step(model: Model, engine: Engine, ranks: int, lora: int) -> str:
    # Qwen3 has 8 key-value heads, so at most 8 ranks can split them
    if (engine == "TP" and ranks > TENSOR) or (engine == "TP x FSDP2" and ranks <= TENSOR):
        return "-"
    moved, held = whole_step(model, engine, ranks, lora)
    return f"{moved / 2**30:.2f} / {held / 2**30:.1f}"


def crossings() -> str:
    """Return a table of how many tokens all ranks may have, as a share of V, for "local" to move fewer bytes."""
    rows = []
    for name, options in {
        "no gradient (reference, old policy, evaluation)": {"gradient": False},
        "gradient to the hidden states (LoRA)": {},
        "gradient to the weight too": {"trained": True},
        "gradient of the entropy, frozen weight": {"entropy_grad": True, "more_outputs": 1},
    }.items():
        cells = []
        for item in (2, 4):
            case = HeadCase(64, 1, 4096, 151936, item=item, **options)
            of_weight = head_received(case, "whole" if case.trained else "in turn")
            cells.append(f"{of_weight / head_received(case, 'local') * case.ranks / case.vocabulary:.2f} V")
        rows.append([name, *cells])
    return _table("Local moves fewer bytes up to this many tokens of all ranks", ("bf16", "fp32"), rows, "pass")


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def _table(title: str, heads: tuple[object, ...], rows: list[list[str]], first: str = "ranks") -> str:
    lines = [f"**{title}**", "", f"| {first} | " + " | ".join(map(str, heads)) + " |", "|---" * (1 + len(heads)) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
