# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that are sliced, and how: by plans, and by what is known of classes.

[Note: slicing plan] A layer cut by columns, "colwise", has some of the outputs, and each rank computes its own. One cut
by rows, "rowwise", has the inputs that such outputs are, and the ranks add what they compute. In between lies what each
rank has a part of: heads of attention, or inner features. A module around layers cut by columns that has heads gets
those of its rank: its numbers of heads and sizes are divided, and no head is torn.

Plans come from three places, and the first that names a layer counts: from `set_tensor_parallelism(plan=...)`, from
what is known here of classes, and from transformers, whose models have one in their configuration. A model of which the
script has given a plan does not use transformers'.

[Note: positions] With `optimize: memory` activations between the layers of a stack lie in parts of positions: norms,
dropout and sums take a part each, and a layer puts its input together. So it begins with an all-gather and ends with a
reduce-scatter, in the place of an all-reduce at its end and one of gradients at its beginning. Either is once for all
layers that take the same: the module around them makes their input ready.

[Note: wrappers] A wrapper has the place of a layer, which it has as `base_layer` or `original_module`, and parameters
of its own, as peft's have. Where it adds a product of two small layers, as LoRA does, one of these is cut with its
layer. Any other one is computed whole, alike on all ranks: one cut by columns gives this rank's part of that, one cut
by rows is given all parts. The layer in it keeps its slices where the wrapper only calls it, and is whole where that
may read its weight. So any code in a wrapper computes what it would with one rank.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lamina.errors import UsageError
from lamina.tensor_parallel import layers, marks
from lamina.tensor_parallel.registry import DistributedModule
from lamina.util.checks import nearest
from lamina.util.module_names import is_in_module

# Parts of a layer that a rank has. Other names of transformers' for the same are in _ALIASES.
STYLES = (
    "colwise",  # some of the outputs
    "rowwise",  # some of the inputs
    "packed_colwise",  # some of the outputs of each of several matrices that lie side by side
    "colwise_gather_output",  # some of the outputs, and all get the whole
    "rowwise_split_input",  # some of the inputs, of which all have the whole
    "embedding_rowwise",  # some of the words, and all get the whole
    "embedding_colwise",  # some of the features, and all get the whole
    "replicated_with_grad_allreduce",  # all of it, for a part of what is computed
)
COLUMNS = ("colwise", "packed_colwise")  # what they give lies in parts
STYLE_OF_ITSELF = "_lamina_style"  # an attribute of layers that are sliced wherever they are
_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
WHOLE = "replicate"
# Styles of plans of a DistributedModule that sees to the exchanges around its layers, and those that they are besides.
_BY_PARENT = {"colwise_of_ready": "colwise", "rowwise_to_positions": "rowwise"}
_INNER = ("base_layer", "original_module")  # names under which wrappers have what they wrap
# Wrappers of peft that call the layer in them, and never read its weight.
_CALLING = tuple(
    f"peft.tuners.{each}"
    for each in (
        "adalora.layer.SVDLinear",
        "ia3.layer.Linear",
        "ia3.layer.Embedding",
        "lora.layer.Embedding",
        "oft.layer.Linear",
        "vera.layer.Linear",
    )
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EXPERTS = ("moe_tp_experts", "moe_identity_expert")  # of transformers: these stay whole, with what is under them

_ATTENTION = dict.fromkeys(("query", "key", "value", "q_proj", "k_proj", "v_proj"), "colwise") | {"out_proj": "rowwise"}
_ROW = {"dense": "rowwise"}
_IN_TRANSFORMERS = {
    "bert.modeling_bert.Bert": {
        "SelfAttention": _ATTENTION,
        "CrossAttention": _ATTENTION,
        "SelfOutput": _ROW,
        "Intermediate": {"dense": "colwise"},
        "Output": _ROW,
    },
    "gpt2.modeling_gpt2.GPT2": {
        "Attention": {"c_attn": "colwise", "q_attn": "colwise", "c_proj": "rowwise"},
        "MLP": {"c_fc": "colwise", "c_proj": "rowwise"},
    },
    "gpt_neo.modeling_gpt_neo.GPTNeo": {
        "SelfAttention": _ATTENTION,
        "MLP": {"c_fc": "colwise", "c_proj": "rowwise"},
    },
    "gptj.modeling_gptj.GPTJ": {"Attention": _ATTENTION, "MLP": {"fc_in": "colwise", "fc_out": "rowwise"}},
    "opt.modeling_opt.OPT": {"Attention": _ATTENTION, "DecoderLayer": {"fc1": "colwise", "fc2": "rowwise"}},
    "phi3.modeling_phi3.Phi3": {"MLP": {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}},
    "t5.modeling_t5.T5": {
        "Attention": dict.fromkeys(("q", "k", "v", "relative_attention_bias"), "colwise") | {"o": "rowwise"},
        "DenseActDense": {"wi": "colwise", "wo": "rowwise"},
        "DenseGatedActDense": {"wi_0": "colwise", "wi_1": "colwise", "wo": "rowwise"},
    },
}
_IN_TRANSFORMERS["roberta.modeling_roberta.Roberta"] = _IN_TRANSFORMERS["bert.modeling_bert.Bert"]
# Layers of classes, by the class's module and name.
_KNOWN = {
    f"transformers.models.{family}{name}": styles
    for family, classes in _IN_TRANSFORMERS.items()
    for name, styles in classes.items()
}


@dataclass(frozen=True)
class Planned:
    """A layer that is to be sliced.

    Attributes:
        name: in the model.
        layer: itself.
        parent: the module that computes with what it gives: the nearest one around it that is called.
        place: the parent's name.
        style: one of STYLES.
        member: the module that has its place in the parent: itself, or a wrapper.
        may_stay_whole: True where no script has asked for it.
        by_parent: True where the module around it has a part in the exchanges with other ranks.
        is_around: True for a wrapper, `member`, that is computed whole around its layer.
        heads: the name or number that the script has given for the parent's heads.
    """

    name: str
    layer: nn.Module
    parent: nn.Module
    place: str
    style: str
    member: nn.Module
    may_stay_whole: bool = True
    by_parent: bool = False
    is_around: bool = False
    heads: str | int | None = None


def planned(root: nn.Module, degree: int = 1, in_parts: bool = False) -> dict[str, Planned]:
    """The layers of a model that are to be sliced, by name, in the model's order. Of plans the innermost counts.

    Args:
        degree: over how many ranks.
        in_parts: whether activations between layers of stacks lie in parts of positions: see [Note: positions].

    Errors:
        UsageError: a plan names what is not there, or a style that is not known.
    """
    given: dict[str, str] = {}
    heads: dict[str, str | int | None] = {}
    known: dict[str, str] = {}
    transformers: dict[str, str] = {}
    led: list[str] = []  # modules with a plan for all that is under them
    inside: dict[str, str] = {}  # of modules that have a part in exchanges, so that no plan of a script's counts
    stacks: list[str] = []
    own: dict[str, str] = {}  # of modules that say themselves how they are sliced
    for name, module in root.named_modules():
        if (style := getattr(module, STYLE_OF_ITSELF, None)) is not None:
            own[name] = style
        if isinstance(module, DistributedModule):
            if in_parts and module.is_stack:
                stacks.append(name)
            is_inside = any(is_in_module(name, each) for each in stacks)
            plan = _by_plan(module, module.positions_plan if is_inside else module.slicing_plan, _BY_PARENT)
            has_part = is_inside or any(style in _BY_PARENT for style in plan.values())
            (inside if has_part else own).update(_below(name, plan))
        if not marks.is_marked(module):
            continue
        known |= _below(name, _known_of(module))
        if (plan := marks.plan_of(module)) is not None:
            below = _below(name, _by_plan(module, plan))
            given |= below
            heads |= dict.fromkeys(below, marks.said_heads(module))
            led.append(name)
        elif (plan := _transformers_plan(module)) and not any(is_in_module(name, each) for each in led):
            transformers |= _below(name, _by_transformers_plan(module, plan))
            led.append(name)
    asked = transformers | known | own | given | inside
    styles = _alone(root, degree) | asked
    found: dict[str, Planned] = {}
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, module in root.named_modules():
        is_wanted = marks.is_marked(module) or name in own or name in inside
        if name in found and name not in asked:  # beside another layer, and cut with it
            continue
        if (style := styles.get(name)) is not None and is_wanted and style != WHOLE:
            place = _called(modules, name.rpartition(".")[0])
            for below, part, its_style in _wrapped(name, module, style):
                plain, by_parent = _BY_PARENT.get(its_style, its_style), its_style in _BY_PARENT
                found[name + below] = Planned(
                    name + below,
                    part,
                    modules[place],
                    place,
                    plain,
                    module,
                    name not in given,
                    by_parent,
                    not below and part is not module,
                    heads.get(name),
                )
    passed_by = {each.place for each in found.values() if each.may_stay_whole and not layers.reaches_base(each.layer)}
    return {name: each for name, each in found.items() if not (each.may_stay_whole and each.place in passed_by)}


def elsewhere(root: nn.Module, planned: Iterable[Planned]) -> list[Planned]:
    """Layers of these that are in other modules of the model, too, which compute with what they give."""
    modules = dict(root.named_modules(remove_duplicate=False))
    places: dict[int, dict[int, str]] = {}  # of a module: those around it, by id
    for name, module in modules.items():
        place = _called(modules, name.rpartition(".")[0])
        places.setdefault(id(module), {}).setdefault(id(modules[place]), place)
    return [
        dataclasses.replace(each, parent=modules[place], place=place)
        for each in planned
        for around, place in places[id(each.member)].items()
        if around != id(each.parent)
    ]


def _called(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module, from this one up, that is called."""
    while name and isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
        name = name.rpartition(".")[0]
    return name


def marked_but_whole(root: nn.Module, sliced: Iterable[str]) -> list[str]:
    """The classes of marked modules with parameters of their own that are not sliced."""
    sliced = set(sliced)
    whole = {
        type(module).__name__: None
        for name, module in root.named_modules()
        if marks.is_marked(module) and name not in sliced and next(module.parameters(recurse=False), None) is not None
    }
    return list(whole)


def _alone(root: nn.Module, degree: int) -> dict[str, str]:
    """The Linears that are sliced wherever they are: those that would become others. torch's own modules compute with
    weights of what is in them."""
    found: dict[str, str] = {}
    for around, parent in root.named_modules():
        if type(parent).__module__.startswith("torch.nn.") and not isinstance(parent, _CONTAINERS):
            continue
        for name, module in parent.named_children():
            if type(module) is nn.Linear and marks.mark_of(module).replace and module.in_features >= degree:
                found |= _below(around, {name: "rowwise_split_input"})
    return found


def _below(name: str, styles: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{below}" if name else below: style for below, style in styles.items()}


def _wrapped(name: str, module: nn.Module, style: str) -> Iterator[tuple[str, nn.Module, str]]:
    """The layer itself. Of a wrapper, as peft's, the layers in it that have slices: see [Note: wrappers]."""
    inner, path = _inner(module)
    if inner is module:
        yield "", module, style
        return
    if style in _BY_PARENT:
        raise UsageError(
            f"{name} ({type(module).__name__}) has the place of a layer of lamina.nn, whose exchanges with other ranks "
            "it does not know: mark the model with replace=False, or slice a model of your own by a plan",
            code="tp-layer",
        )
    if _is_of_low_rank(module):
        yield path, inner, style
        beside = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
        for below, part in module.get_submodule(beside).named_modules(prefix=f".{beside}") if beside else ():
            if isinstance(part, nn.Linear):
                yield below, part, style
        return
    gives_parts, takes_parts = style in COLUMNS, style == "rowwise" and layers.is_linear(inner)
    if _only_calls(module):
        yield path, inner, "colwise_gather_output" if gives_parts else "rowwise_split_input" if takes_parts else style
    if gives_parts or takes_parts:
        yield "", inner, style


def _inner(module: nn.Module) -> tuple[nn.Module, str]:
    """The layer in a wrapper, or in several around each other, and its place in these; the module itself for any
    other."""
    path = ""
    while (
        key := next((each for each in _INNER if isinstance(getattr(module, each, None), nn.Module)), None)
    ) is not None:
        module, path = getattr(module, key), f"{path}.{key}"
    return module, path


def _is_of_low_rank(module: nn.Module) -> bool:
    """True for a wrapper that adds a product of two small layers to what one layer gives, and nothing else."""
    parts = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    if not all(isinstance(part, nn.Module) for part in parts) or getattr(module, "lora_variant", None):
        return False
    if isinstance(_inner(module.base_layer)[0], nn.Module) and module.base_layer is not _inner(module)[0]:
        return False
    known = {id(each) for part in (module.base_layer, *parts) for each in part.parameters()}
    are_linear = all(isinstance(each, nn.Linear) for part in parts for each in part.children())
    return are_linear and all(id(each) in known for each in module.parameters())


def _only_calls(module: nn.Module) -> bool:
    """True for a wrapper of peft's that calls the layer in it, and never reads its weight."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    return not kinds.isdisjoint(_CALLING) and not getattr(module, "lora_variant", None)


def _known_of(module: nn.Module) -> dict[str, str]:
    for kind in type(module).__mro__:
        if (plan := _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return {name: style for name, style in plan.items() if hasattr(module, name)}
    return {}


def _transformers_plan(module: nn.Module) -> Mapping[str, str] | None:
    kinds = type(module).__mro__
    if not any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds):
        return None
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else None


def _by_transformers_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The styles of a plan that is for models of all sizes and options: it may name what this one lacks."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    experts = [name for pattern, style in plan.items() if style in _EXPERTS for name in _matching(pattern, names)]
    styles: dict[str, str] = {}
    for pattern, given in plan.items():
        style = _ALIASES.get(given, given)
        for name in _matching(pattern, [*names, *parameters]):
            if any(is_in_module(name, each) for each in experts):
                continue
            if name in parameters:
                raise UsageError(
                    f"transformers' plan of {type(module).__name__} slices the parameter {name}, which is not "
                    f"available: {_OWN_PLAN}",
                    code="tp-plan",
                )
            styles[name] = _known_style(style, pattern, f"transformers' plan of {type(module).__name__}")
    return styles


_OWN_PLAN = "give a plan of your own with lamina.set_tensor_parallelism(model, plan={...}), without it"


def _by_plan(module: nn.Module, plan: Mapping[str, str], others: Iterable[str] = ()) -> dict[str, str]:
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    styles: dict[str, str] = {}
    for pattern, given in plan.items():
        style = _ALIASES.get(given, given)
        if given not in others:
            _known_style(style, pattern, f"the plan of {type(module).__name__}")
        matches = list(_matching(pattern, names))
        if not matches:
            raise UsageError(
                f'the plan of {type(module).__name__} has "{pattern}", which matches no module'
                f"{_nearest(pattern, dict.fromkeys(_as_pattern(name) for name in names))}",
                code="tp-plan",
            )
        styles.update(dict.fromkeys(matches, style))
    return styles


def _known_style(style: str, pattern: str, whose: str) -> str:
    if style in STYLES or style == WHOLE:
        return style
    raise UsageError(
        f'{whose} has the style "{style}" for "{pattern}"{_nearest(style, STYLES)}; known are {", ".join(STYLES)}',
        code="tp-plan",
    )


def _matching(pattern: str, names: Iterable[str]) -> Iterator[str]:
    matches = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*")))).fullmatch
    return (name for name in names if matches(name))


def _as_pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _nearest(given: str, known: Iterable[str]) -> str:
    near = nearest(given, known, 0.4)
    return f', the nearest is "{near}"' if near else ""
