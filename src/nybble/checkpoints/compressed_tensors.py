"""compressed-tensors: the layout that transformers and vLLM load.

A quantized linear is stored as a few tensors named after it, and `quantization_config` says for groups of modules
what they mean:

    pack-quantized         weight_packed int32 [N, ceil(K b / 32)], weight_scale, weight_shape int64 [2]
                           and, if asymmetric, weight_zero_point int32 [ceil(N b / 32), groups], packed along N
    int-quantized          weight int8 [N, K], weight_scale, weight_zero_point int8 if asymmetric
    float-quantized,       weight float8_e4m3fn [N, K], weight_scale
    naive-quantized        (the second name where activations keep their precision)
    mxfp8-quantized        weight float8_e4m3fn [N, K], weight_scale uint8 (E8M0 codes) [N, K / 32]
    mxfp4-pack-quantized   weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]
    mxfp6-pack-quantized   weight_packed uint8 [N, 3 K / 4], weight_scale uint8 [N, K / 32]
    nvfp4-pack-quantized   weight_packed uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16],
                           weight_global_scale and, for quantized inputs, input_global_scale: float32 [1]

Integers are offset by 2^(b-1) and packed without gaps, nibbles have the even column low, scales lie row by row. A
global scale is a divisor, w = e2m1 * scale / global; in memory we hold the multiplier t = fl32(1 / global). Writing
fl32(1 / t) and reading it gives t back, for every t that is a reciprocal (a test tries all mantissas); of other
numbers, which ModelOpt's files may hold, one in six comes back one unit away.

Groups must divide K: the library refuses to run others (its FP8 blocks may be ragged, its groups of inputs may not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nybble.checkpoints import rotations
from nybble.checkpoints.rotations import matches
from nybble.checkpoints.stored import Ledger, StoredLinear, amax_of, encode_of
from nybble.errors import BadInput, DamagedFile, Unsupported
from nybble.formats import table
from nybble.formats.spec import BlockFormat, ElementFormat, IntFormat
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE, DENSE_INT32
from nybble.quantize.schemes import SCHEMES, Scheme

METHOD = "compressed-tensors"
VERSION = "0.20.0"  # of the library whose layout this is
E8M0_DTYPE, E4M3_DTYPE = "torch.uint8", "torch.float8_e4m3fn"


@dataclass(frozen=True)
class Group:
    """How the linears of one config group are stored.

    Attributes:
        weight: the weights' format.
        activation: the inputs' format, or None.
        layout: compressed-tensors' name for the arrangement ("pack-quantized" …).
    """

    weight: BlockFormat
    activation: BlockFormat | None
    layout: str


def describe(fmt: BlockFormat, activation: bool = False) -> dict[str, Any] | None:
    """The arguments that mean `fmt` for weights, or for inputs; None where the schema has none."""
    kind, scale_dtype = _element_kind(fmt)
    strategy = _strategy(fmt, activation)
    if kind is None or strategy is None:
        return None
    local = strategy["strategy"] == "tensor_group"
    dynamic: bool | str = activation if not (activation and local) else "local"
    typed = {"scale_dtype": scale_dtype, "zp_dtype": scale_dtype} if scale_dtype else {}
    return {
        "num_bits": fmt.element.bits,
        "type": kind,
        "symmetric": not fmt.zero_point,
        **strategy,
        "dynamic": dynamic,
        **typed,
    }


def _element_kind(fmt: BlockFormat) -> tuple[str | None, str | None]:
    """("int" or "float", the scale's dtype where it is stored in eight bits), or (None, None)."""
    element, scale = fmt.element, fmt.scale
    if isinstance(element, IntFormat):
        whole = element == table.INT.get(element.bits) and scale.bits > 8
        return ("int", None) if whole else (None, None)
    if scale.bits > 8:
        return ("float", None) if element == table.E4M3 else (None, None)
    if scale == table.E8M0 and fmt.block == table.BLOCKS["mxfp4"].block and fmt.tensor_scale is None:
        return ("float", E8M0_DTYPE) if element in (table.E2M1, table.E2M3, table.E4M3) else (None, None)
    nvfp4 = table.BLOCKS["nvfp4"]
    same = (element, scale, fmt.block) == (nvfp4.element, nvfp4.scale, nvfp4.block)
    return ("float", E4M3_DTYPE) if same and fmt.tensor_scale else (None, None)


def _strategy(fmt: BlockFormat, activation: bool) -> dict[str, Any] | None:
    rows, columns = fmt.block
    if fmt.tensor_scale is not None:
        return {"strategy": "tensor_group", "group_size": columns}
    if rows == 1:
        if columns is None:
            return {"strategy": "token" if activation else "channel"}
        return {"strategy": "group", "group_size": columns}
    if rows is None and columns is None:
        return {"strategy": "tensor"}
    return None if activation or not (rows and columns) else {"strategy": "block", "block_structure": [rows, columns]}


def group(weight: BlockFormat, activation: BlockFormat | None) -> Group | None:
    """The group that stores this pair of formats; None where the schema cannot express it."""
    if describe(weight) is None or (activation is not None and describe(activation, True) is None):
        return None
    if isinstance(weight.element, IntFormat):
        return Group(weight, activation, "pack-quantized" if activation is None else "int-quantized")
    if weight.scale == table.E8M0:
        packed = "quantized" if weight.element.bits == 8 else "pack-quantized"
        return Group(weight, activation, f"mxfp{weight.element.bits}-{packed}")
    if weight.tensor_scale is not None:
        return Group(weight, activation, "nvfp4-pack-quantized")
    return Group(weight, activation, "naive-quantized" if activation is None else "float-quantized")


def refusal(weight: BlockFormat, activation: BlockFormat | None, k: int) -> str | None:
    """Why a weight with K = `k` inputs cannot be stored in these formats; None where it can."""
    if group(weight, activation) is None:
        name = weight.name if activation is None else f"{weight.name} with {activation.name} inputs"
        return f"compressed-tensors has no way to say {name}"
    for what, fmt in (("weights", weight), ("inputs", activation)):
        columns = fmt.block[1] if fmt else None
        ragged_block = what == "weights" and fmt is not None and fmt.block[0] != 1
        if columns and k % columns and not ragged_block:
            return f"K = {k} is not a multiple of {columns}, the group of its {what}"
    return None


def nearest(weight: BlockFormat, activation: BlockFormat | None, widths: Iterable[int]) -> list[str]:
    """Names of schemes that can be stored for linears of these K, the nearest to the given formats first."""
    ks = set(widths)

    def distance(scheme: Scheme) -> tuple[Any, ...]:
        kept = (scheme.activation is None) == (activation is None)
        same = type(scheme.weight.element) is type(weight.element)
        return (abs(scheme.weight.element.bits - weight.element.bits), not kept, not same,
                scheme.weight.zero_point != weight.zero_point)  # fmt: skip

    able = [s for s in SCHEMES.values() if all(refusal(s.weight, s.activation, k) is None for k in ks)]
    return [scheme.name for scheme in sorted(able, key=distance)][:3]


def run_dtype(groups: Iterable[Group], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which transformers can run a model of `dtype` with these groups: it decompresses weights with
    8-bit scales to bfloat16, whatever the model is, and then needs a bfloat16 model."""
    return torch.bfloat16 if any(one.weight.scale.bits == 8 for one in groups) else dtype


def config(
    groups: Mapping[Group, list[str]], ignore: list[str], rotated: Mapping[int, list[str]] | None = None
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        groups: each group with the names of its modules; a single group targets the class Linear.
        ignore: the names of the linears that stay as they are.
        rotated: names of linears whose inputs are rotated as they come, by the size of the Hadamard blocks.
    """
    described: dict[str, Any] = {}
    for number, (one, names) in enumerate(groups.items()):
        described[f"group_{number}"] = {
            "targets": ["Linear"] if len(groups) == 1 else names,
            "weights": describe(one.weight),
            "input_activations": one.activation and describe(one.activation, True),
            "output_activations": None,
            "format": one.layout,
        }
    layouts = {one.layout for one in groups}
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        **({"transform_config": rotations.describe(rotated)} if rotated else {}),
    }


def store(linear: StoredLinear) -> dict[str, Tensor]:
    """The tensors of a linear, by their names after the module's.

    Raises:
        Unsupported: the formats cannot be expressed.
        BadInput: the inputs need a calibrated scale and have none.
    """
    weight = linear.weight.to_layout(DENSE)
    one = group(weight.format, linear.activation)
    why = refusal(weight.format, linear.activation, weight.shape[-1])
    if one is None or why:
        raise Unsupported(why or "")
    return {**_store_codes(weight, one), **_store_scales(weight, one), **_store_input(linear)}


def _store_codes(weight: QuantTensor, one: Group) -> dict[str, Tensor]:
    bits = weight.format.element.bits
    if one.layout == "pack-quantized":
        packed = DENSE_INT32.pack(weight.unpack(), bits)
        return {"weight_packed": packed, "weight_shape": torch.tensor(weight.shape, dtype=torch.int64)}
    if one.layout == "int-quantized":
        shift = 8 - bits
        return {"weight": (weight.unpack() << shift).view(torch.int8) >> shift}
    if bits == 8:
        return {"weight": weight.unpack().view(torch.float8_e4m3fn)}
    return {"weight_packed": weight.codes}


def _store_scales(weight: QuantTensor, one: Group) -> dict[str, Tensor]:
    fmt = weight.format
    scale = weight.scale.view(torch.float8_e4m3fn) if fmt.scale == table.E4M3 else weight.scale
    stored = {"weight_scale": scale.flatten() if fmt.block == (None, None) else scale}
    if weight.tensor_scale is not None:
        stored["weight_global_scale"] = (1 / weight.tensor_scale).reshape(1)
    if weight.zero_point is not None:
        packed = one.layout == "pack-quantized"
        zeros = weight.zero_point
        stored["weight_zero_point"] = _pack_zero_point(zeros, fmt.element.bits) if packed else zeros
    return stored


def _pack_zero_point(zero_point: Tensor, bits: int) -> Tensor:
    """int8 [N, groups] as int32 [ceil(N bits / 32), groups]: packed along N."""
    codes = zero_point.view(torch.uint8) & (1 << bits) - 1
    return DENSE_INT32.pack(codes.t().contiguous(), bits).t().contiguous()


def _store_input(linear: StoredLinear) -> dict[str, Tensor]:
    if linear.activation is None or linear.activation.tensor_scale is None:
        return {}
    if linear.activation_amax is None:
        raise BadInput(
            f"{linear.activation.name} inputs need a scale measured on data, and none was: "
            "quantize with calibration=<batches the model can be called with>, or keep the inputs (…A16)"
        )
    return {"input_global_scale": encode_of(linear.activation, linear.activation_amax).reshape(1)}


class Reader:
    """Reads the linears of a checkpoint by its `quantization_config`.

    Raises:
        Unsupported: the configuration asks for something that is not read; it is named.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("sparsity_config"):
            raise Unsupported("compressed-tensors checkpoints with a sparsity_config are not read")
        self._rotations = rotations.parse(config)
        self.ignore = list(config.get("ignore") or [])
        self.groups: list[tuple[list[str], Group]] = []
        for name, described in (config.get("config_groups") or {}).items():
            self.groups.append((list(described["targets"]), _parse(name, described, config.get("format"))))

    def find(self, name: str, module: nn.Module) -> Group | None:
        """How the module called `name` is stored, or None where it is not quantized."""
        if matches(name, module, self.ignore):
            return None
        return next((one for targets, one in self.groups if matches(name, module, targets)), None)

    def rotated(self, name: str, module: nn.Module) -> int | None:
        """The size of the Hadamard blocks that a module's inputs are rotated by as they come; None for none."""
        return rotations.find(self._rotations, name, module)

    def read(self, name: str, one: Group, shape: tuple[int, int], tensors: Ledger) -> StoredLinear:
        """The linear called `name`, logical weight shape [N, K]."""
        if f"{name}.weight_g_idx" in tensors:
            raise Unsupported(f"{name}: weights in activation order (weight_g_idx) are not read")
        codes = _read_codes(name, one, shape, tensors)
        fmt, scale = _read_scale(name, one.weight, shape, tensors)
        tensor_scale = None
        if fmt.tensor_scale is not None:
            tensor_scale = 1 / tensors.scalar(f"{name}.weight_global_scale")
        zero_point = _read_zero_point(name, one, shape, tensors)
        weight = QuantTensor(fmt, shape, codes, scale, tensor_scale, zero_point)
        amax = None
        if one.activation is not None and one.activation.tensor_scale is not None:
            amax = amax_of(one.activation, tensors.scalar(f"{name}.input_global_scale"))
        return StoredLinear(weight, one.activation, amax)


def _parse(name: str, described: Mapping[str, Any], layout: str | None) -> Group:
    if described.get("output_activations"):
        raise Unsupported(f"{name}: quantized outputs are not read")
    weights, inputs = described.get("weights"), described.get("input_activations")
    if not weights:
        raise Unsupported(f"{name}: quantized inputs with plain weights are not read")
    stored_as = described.get("format") or layout or ""
    return Group(_format(weights, stored_as), _format(inputs, "", True) if inputs else None, stored_as)


_SMALL_FLOATS = {(4, 16): "nvfp4", (4, 32): "mxfp4", (6, 32): "mxfp6_e2m3", (8, 32): "mxfp8_e4m3"}


def _format(args: Mapping[str, Any], layout: str, activation: bool = False) -> BlockFormat:
    """The block format that weight or input arguments mean."""
    bits, kind, size = args["num_bits"], args["type"], args.get("group_size")
    strategy = args.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    if activation and not args.get("dynamic"):
        raise Unsupported(f"static input scales ({bits}-bit {kind} by {strategy}) are not read, dynamic ones are")
    powers = args.get("scale_dtype") == E8M0_DTYPE or layout.startswith("mxfp")
    suffix = "" if args.get("symmetric", True) else "_asym"
    if strategy == "block":
        rows, columns = args["block_structure"]
        name = f"fp{bits}_block{rows}" if rows == columns else ""
    elif strategy == "tensor_group" or (kind == "float" and (bits < 8 or powers)):
        name = _SMALL_FLOATS.get((bits, size or 0), "")
    else:
        name = f"{'int' if kind == 'int' else 'fp'}{bits}_{f'g{size}' if strategy == 'group' else strategy}{suffix}"
    try:
        return table.block(name)
    except ValueError as error:
        shown = {key: value for key, value in args.items() if value is not None}
        raise Unsupported(f"compressed-tensors arguments that no format here means: {shown}") from error


def _read_codes(name: str, one: Group, shape: tuple[int, int], tensors: Ledger) -> Tensor:
    """Codes in the dense layout."""
    n, k = shape
    bits = one.weight.element.bits
    if one.layout == "pack-quantized":
        stated = tuple(tensors.get(f"{name}.weight_shape").tolist())
        if stated != shape:
            raise DamagedFile(f"{name}.weight_shape says {stated}, the model expects {shape}")
        packed = tensors.get(f"{name}.weight_packed", (n, -(-k * bits // 32)), torch.int32)
        return DENSE.pack(DENSE_INT32.unpack(packed, shape, bits), bits)
    if one.layout == "int-quantized":
        whole = tensors.get(f"{name}.weight", shape, torch.int8).view(torch.uint8)
        return DENSE.pack(whole & (1 << bits) - 1, bits)
    if bits == 8:
        return tensors.get(f"{name}.weight", shape, torch.float8_e4m3fn).view(torch.uint8)
    return tensors.get(f"{name}.weight_packed", (n, k * bits // 8), torch.uint8)


def _read_scale(name: str, fmt: BlockFormat, shape: tuple[int, int], tensors: Ledger) -> tuple[BlockFormat, Tensor]:
    """The scales, and the format with the precision in which they are stored."""
    scale = tensors.scale(f"{name}.weight_scale", fmt, shape)
    if fmt.scale.bits == 8:
        return fmt, scale.view(torch.uint8)
    own, stored = _native(fmt.scale), scale.dtype
    if torch.equal(scale.to(own).to(stored), scale):
        return fmt, scale.to(own)
    wide = next((f for f in (table.FP16, table.BF16, table.FP32) if _native(f) == stored), None)
    if wide is None:
        raise Unsupported(f"{name}: scales in {stored} are not read")
    return table.with_scale(fmt, wide), scale


def _native(fmt: ElementFormat) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[fmt.name]


def _read_zero_point(name: str, one: Group, shape: tuple[int, int], tensors: Ledger) -> Tensor | None:
    """int8 [N, groups], or None for symmetric formats; old files hold zeros for those."""
    fmt = one.weight
    if not fmt.zero_point:
        if f"{name}.weight_zero_point" in tensors and bool(tensors.get(f"{name}.weight_zero_point").any()):
            raise DamagedFile(f"{name}: has zero points, and its configuration says symmetric")
        return None
    if one.layout != "pack-quantized":
        return tensors.scale(f"{name}.weight_zero_point", fmt, shape).to(torch.int8)
    bits, n = fmt.element.bits, shape[0]
    packed = tensors.get(f"{name}.weight_zero_point", dtype=torch.int32)
    packed = packed.t().clone(memory_format=torch.contiguous_format)
    codes = DENSE_INT32.unpack(packed, (packed.shape[0], n), bits).t().contiguous()
    shift = 8 - bits
    return (codes << shift).view(torch.int8) >> shift
