"""Tiny random models from transformers' own classes, and a driver that runs octavo's over paged KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from octavo.engine.api import SamplingParams
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.hf_config import read_spec
from octavo.engine.llm import LLM
from octavo.engine.models.loader import load_model
from octavo.engine.models.model import Model
from octavo.kernels.ops import AttentionMetadata, Ops
from octavo.kernels.select import select_ops

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VOCAB_SIZE = 264  # of models that generate: every byte, and eight special tokens
UNWRITTEN = 1e4  # a slot that is read without having been written spoils the logits
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # logits far enough apart for a wrong layer to show
}


def _make_tiny(family: str = "llama", **changes: Any) -> Any:
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**(TINY | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def _tiny_of(model_class: Any, config_class: Any, **changes: Any) -> Any:
    torch.manual_seed(7)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = TINY | {"vocab_size": VOCAB_SIZE} | special | changes
    model = model_class(config_class(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def _assert_read_alike(model_class: Any, **keys: Any) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 6, "num_attention_heads": 32}
    own = {"architectures": [model_class.__name__]}
    written = model_class.config_class(**sizes, **keys).to_dict()
    assert read_spec({**sizes, **keys, **own}, "short") == read_spec({**written, **own}, "full")


class Row(NamedTuple):
    """Tokens of one sequence in a step: those from ``start`` on; what is before was computed."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class PagedModel:
    """A model over one memory of blocks, whose steps are recorded where the op set records."""

    def __init__(self, model: Model, ops: Ops, num_blocks: int) -> None:
        spec = model.kv_cache_spec(num_blocks, BLOCK_SIZE)
        self.caches = [ops.allocate_kv_cache(spec, CPU) for _ in range(model.num_layers)]
        for cache in self.caches:
            cache.key.fill_(UNWRITTEN)
            cache.value.fill_(UNWRITTEN)
        self.model = model

        def forward(t: Tensor, p: Tensor, m: Sequence[AttentionMetadata]) -> Tensor:
            return model.forward(t, p, self.caches, [*m] * model.num_layers)

        self._forward = ops.record_step(forward) if model.is_recordable else forward

    def step(self, *rows: Row) -> list[Tensor]:
        """Logits of each row's tokens, ``[num_tokens, vocab_size]``."""
        counts = [len(row.tokens) - row.start for row in rows]
        with torch.inference_mode():
            token_ids, positions, metadata = _step_inputs(rows, counts)
            hidden = self._forward(token_ids, positions, [metadata])
            return list(self.model.logits(hidden).split(counts))  # type: ignore[no-untyped-call]


def _step_inputs(
    rows: Sequence[Row], counts: Sequence[int]
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Token ids, positions and metadata; rows with one token must come first."""
    width = max(len(row.blocks) for row in rows)
    places = [(row, position) for row in rows for position in range(row.start, len(row.tokens))]
    slots = [row.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in places]
    lengths = [len(row.tokens) for row in rows]
    tables = [[*row.blocks, *[row.blocks[0]] * (width - len(row.blocks))] for row in rows]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_lens_host=list(counts),
        seq_lens_host=lengths,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        num_decode_rows=sum(1 for _ in itertools.takewhile(lambda count: count == 1, counts)),
    )
    token_ids = torch.tensor([row.tokens[position] for row, position in places])
    return token_ids, torch.tensor([position for _, position in places]), metadata


class FamilyCheck:
    """octavo's model beside the transformers model that its folder was saved from."""

    def __init__(
        self, theirs: Any, folder: Path, length: int, shortest: int, model_impl: str
    ) -> None:
        self.theirs = theirs
        self.folder = folder
        self.model_impl = model_impl
        random = torch.Generator().manual_seed(3)
        self.long, other = torch.randint(3, VOCAB_SIZE - 3, (2, length), generator=random).tolist()
        self.shared = 2 * BLOCK_SIZE
        self.hit = self.long[: self.shared] + other[: length // 2]
        self.short = other[:shortest]

    def logits(
        self, ops: Ops, max_model_len: int | None = None, *, has_foreign_products: bool = False
    ) -> None:
        """Prefill in one piece and in pieces, decode, batches of all kinds of rows, a prefix hit.

        Args:
            has_foreign_products: matrices are multiplied by PyTorch, whose bits depend on the rows beside.
        """
        ours = load_model(
            open_checkpoint(self.folder, self.model_impl),
            ops,
            dtype=torch.float32,
            device=CPU,
            max_model_len=max_model_len,
        )
        expected = _transformers_logits(self.theirs, self.long)
        whole = self._in_pieces(ours, ops, [len(self.long)])
        _assert_close(whole, expected)
        for chunks in ([1], [3], [7], [30, 1, 1, 3]):
            pieces = self._in_pieces(ours, ops, chunks)
            _assert_close(pieces, expected)
            if ops.name == "cpu" and not has_foreign_products:
                assert torch.equal(pieces, whole)
        self._batches(ours, ops)

    def _blocks(self, size: int) -> int:
        return -(-size // BLOCK_SIZE)

    def _in_pieces(self, ours: Model, ops: Ops, chunks: Sequence[int]) -> Tensor:
        """The long sequence; its blocks lie in descending order, never adjacent."""
        num_blocks, logits, end = self._blocks(len(self.long)), list[Tensor](), 0
        paged = PagedModel(ours, ops, 2 * num_blocks)
        blocks = range(2 * num_blocks - 1, 0, -2)
        while end < len(self.long):
            start, end = end, min(end + chunks[len(logits) % len(chunks)], len(self.long))
            row = Row(self.long[:end], start, blocks[: self._blocks(end)])
            logits.append(paged.step(row)[0].clone())
        return torch.cat(logits)

    def _batches(self, ours: Model, ops: Ops) -> None:
        """The long sequence is filled up to its last tokens; then it decodes beside a prompt of which it
        holds the first blocks, and beside another; each row's logits are those of its sequence alone."""
        num_blocks = self._blocks(len(self.long))
        paged = PagedModel(ours, ops, 3 * num_blocks)
        blocks = list(range(num_blocks))
        shared = self.shared // BLOCK_SIZE
        hit_blocks = blocks[:shared] + list(range(num_blocks, 2 * num_blocks - shared))
        short_blocks = list(range(2 * num_blocks, 2 * num_blocks + self._blocks(len(self.short))))
        last = len(self.long) - 2
        steps = [
            [Row(self.long[:last], 0, blocks)],
            [
                Row(self.long[:-1], last, blocks),
                Row(self.hit[:-3], self.shared, hit_blocks),
                Row(self.short[:-2], 0, short_blocks),
            ],
            [
                Row(self.short[:-1], len(self.short) - 2, short_blocks),
                Row(self.long, last + 1, blocks),
                Row(self.hit, len(self.hit) - 3, hit_blocks),
            ],
        ]
        for rows in steps:
            for row, logits in zip(rows, paged.step(*rows), strict=True):
                expected = _transformers_logits(self.theirs, row.tokens)
                _assert_close(logits, expected[row.start :])

    def greedy(self, backend: str, **options: Any) -> None:
        """64 tokens through the whole engine, three prompts at once in chunks of a few tokens."""
        _write_tokenizer(self.folder)
        sizes = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 256, "max_num_seqs": 4}
        llm = LLM(
            str(self.folder),
            dtype="float32",
            attention_backend=backend,
            model_impl=self.model_impl,
            max_num_batched_tokens=16,
            **(sizes | options),
        )
        prompts = [self.long[:30], self.hit[:19], self.short]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        try:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
        finally:
            llm.close()
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == self._greedy_of_transformers(prompt)

    def _greedy_of_transformers(self, prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(64):
            ids.append(int(_transformers_logits(self.theirs, ids)[-1].argmax()))
        return ids[len(prompt) :]


def _write_tokenizer(folder: Path) -> None:
    """The 256 bytes, and special tokens up to the model's vocabulary."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{index}|>" for index in range(len(pieces), VOCAB_SIZE)])
    tokenizer.save(str(folder / "tokenizer.json"))


class PagedSequence:
    """One sequence fed to a model in pieces; its blocks lie in descending order, never adjacent."""

    def __init__(self, model: Model, ops: Ops, max_tokens: int) -> None:
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        spec = model.kv_cache_spec(2 * num_blocks, BLOCK_SIZE)
        self.model = model
        self.num_computed_tokens = 0
        self.block_ids = list(range(2 * num_blocks - 1, 0, -2))
        self.caches = [ops.allocate_kv_cache(spec, CPU) for _ in range(model.num_layers)]
        for cache in self.caches:
            cache.key.fill_(UNWRITTEN)
            cache.value.fill_(UNWRITTEN)

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of ``token_ids``, ``[len(token_ids), vocab_size]``."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + len(token_ids)
        self.num_computed_tokens = end
        with torch.inference_mode():
            hidden = self.model.forward(
                torch.tensor(token_ids),
                torch.arange(start, end),
                self.caches,
                [self._metadata(start, end)] * self.model.num_layers,
            )
            return self.model.logits(hidden)

    def _metadata(self, start: int, end: int) -> AttentionMetadata:
        blocks = self.block_ids[: -(-end // BLOCK_SIZE)]
        slots = [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(start, end)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.tensor([blocks], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=[end - start],
            seq_lens_host=[end],
            max_query_len=end - start,
            max_seq_len=end,
            num_decode_rows=int(end - start == 1),
        )


def _feed(model: Model, ops: Ops, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    sequence, logits, start = PagedSequence(model, ops, len(token_ids)), list[Tensor](), 0
    while start < len(token_ids):
        size = chunks[len(logits) % len(chunks)]
        logits.append(sequence.feed(token_ids[start : start + size]))
        start += size
    return torch.cat(logits)


def _permute(rows: Any, num_heads: int) -> Any:
    """How llama.cpp's converter stores q and k."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _write_gguf(
    model: Any,
    path: Path,
    type: str = "F32",
    *,
    arch: str = "llama",
    is_permuted: bool = True,
    convert: Callable[[str, Any], Any] = lambda name, values: values,
    tensors: Mapping[str, Sequence[float]] = MappingProxyType({}),
    blocks: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    tokens: Sequence[str] | None = None,
    **metadata: Any,
) -> None:
    """Write a transformers model as GGUF and round the model's own weights to what was written.

    Args:
        blocks: type and rows of matrices, ``[rows, bytes]`` uint8, that are written instead.
    """
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    _add_metadata(writer, config)
    writer.add_token_list(tokens or [f"t{index}" for index in range(config.vocab_size)])
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    kind = gguf.GGMLQuantizationType[type]
    names = gguf.get_tensor_name_map(_gguf_arch(arch), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, own in _gguf_tensors(model):
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        values = own.numpy()
        stored = np.ascontiguousarray(convert(name, values))
        if is_permuted and (num_heads := heads.get(name.split(".")[-2])) is not None:
            stored = _permute(stored, num_heads)
        if values.ndim == 1 or own_name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(own_name, stored)
            continue
        if name in blocks:
            own_type, rows = blocks[name]
            rows = rows if num_heads is None else _permute(rows, num_heads)
            writer.add_tensor(own_name, rows, raw_dtype=gguf.GGMLQuantizationType[own_type])
            continue
        writer.add_tensor(own_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        own.copy_(torch.from_numpy(rounded))
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = 1.0 / 10000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for name, numbers in tensors.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's own numbers; experts' gate and up projections, which transformers joins, by themselves."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            gate, up = parameter.data.chunk(2, dim=1)
            module = name.removesuffix("gate_up_proj")
            yield from ((f"{module}gate_proj.weight", gate), (f"{module}up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", parameter.data
        else:
            yield name, parameter.data


def _gguf_arch(name: str) -> Any:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _add_metadata(writer: Any, config: Any) -> None:
    """What all architectures say alike."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])


def _transformers_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def _assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    difference = (got - expected).abs().max().item()
    assert difference <= 1e-4 * expected.abs().max().item()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads and lose much where the processors are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Any]:
    """``make_tiny(family="llama", **config)``: a random transformers model in float32."""
    return _make_tiny


@pytest.fixture(scope="session")
def transformers_logits() -> Callable[[Any, Sequence[int]], Tensor]:
    """transformers' logits of every position, ``[num_tokens, vocab_size]``."""
    return _transformers_logits


@pytest.fixture(scope="session")
def feed() -> Callable[[Model, Ops, Sequence[int], Sequence[int]], Tensor]:
    """Logits of every position when tokens come in pieces of the given sizes, over and over."""
    return _feed


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """The bound of the project: ``max|a - b| <= 1e-4 * max|b|``, in float32."""
    return _assert_close


@pytest.fixture(params=["reference", "torch", pytest.param("cpu", marks=pytest.mark.native)])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(request.param, CPU)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """``save(model, **options)``: a transformers model as a folder."""

    def save_model(model: Any, **options: Any) -> Path:
        model.save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return save_model


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    """``write_gguf(model, path, type="F32", arch="llama", is_permuted=True, convert=..., **metadata)``.

    Metadata go by GGUFWriter's ``add_`` names, tensors by the gguf package's names for ``arch``. Matrices are
    stored as ``type``; the model's own are rounded to the values that were stored. ``convert`` makes of a
    tensor's name and values what the file holds: other rows, or another vector. ``tensors`` are further ones.
    """
    return _write_gguf


@pytest.fixture(scope="session")
def load() -> Callable[[Path, Ops], Model]:
    """A checkpoint as octavo loads it in float32."""

    def load_path(path: Path, ops: Ops) -> Model:
        return load_model(open_checkpoint(path), ops, dtype=torch.float32, device=CPU)

    return load_path


@pytest.fixture(scope="session")
def tiny_of() -> Callable[..., Any]:
    """``tiny_of(model_class, config_class, **config)``: a random transformers model in float32."""
    return _tiny_of


@pytest.fixture(scope="session")
def assert_read_alike() -> Callable[..., None]:
    """``assert_read_alike(model_class, **keys)``: a ``config.json`` of a few sizes and ``keys`` says what the one
    does in which transformers' configuration class has filled in the rest."""
    return _assert_read_alike


@pytest.fixture
def check_family(save: Callable[..., Path]) -> Callable[..., FamilyCheck]:
    """``check_family(theirs, length=61, shortest=5)``: compare with octavo's by its ``logits`` and ``greedy``.

    Args:
        path: of a checkpoint of the model; by default it is saved as a folder.
        length: of the longest sequence.
        shortest: length of the shortest.
        model_impl: whose code computes octavo's side.
    """

    def check(
        theirs: Any,
        length: int = 61,
        shortest: int = 5,
        path: Path | None = None,
        model_impl: str = "auto",
    ) -> FamilyCheck:
        return FamilyCheck(theirs, path or save(theirs), length, shortest, model_impl)

    return check


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path], None]:
    return _write_tokenizer
