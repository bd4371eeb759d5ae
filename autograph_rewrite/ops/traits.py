"""Lists traits of ops: which ops measure, forward, route, read or write; all parts but the certificate use the table.

has("ShapeN", "measures")              True
ops_with("enters")                     frozenset({"Enter", "RefEnter"})
operands("GatherV2", "indexed_by")     (1,)

Each line of the table is a trait and its ops. A word in lower case stands for all ops of another trait. `Op@1,2` lists
the operands that the trait refers to. A word with other characters is a regular expression: libraries may register
more ops that match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

# fmt: off
_TRAITS: Mapping[str, str] = {
    # ---- Sizes
    "shapes": "Shape ShapeN",
    "lengths": "shapes Size",
    "measures": "lengths Rank",
    # one output, which is a constant where the shape is known
    "folds_to_size": "Shape Size Rank VariableShape",
    # small results, known as soon as the shapes of the operands are
    "sizes": "measures BroadcastGradientArgs",
    # they read only the size of their operand
    "reads_size": "sizes ZerosLike OnesLike",
    # ---- Values that are passed on
    # the same tensor, wherever the op runs
    "forwards": "Identity RefIdentity StopGradient PreventGradient Snapshot DeepCopy Copy CopyHost",
    "reshapes": "Reshape Squeeze ExpandDims",
    # the same numbers, in another shape or type
    "copies": "Identity StopGradient Cast reshapes",
    "rearranges": "Identity Reshape",
    # the output is the buffer of the first input
    "views": "forwards_handle IdentityN StopGradient PreventGradient Snapshot reshapes CheckNumerics EnsureShape "
        "LoopCond PlaceholderWithDefault ReadVariableOp",
    "keeps_value": "Identity RefIdentity StopGradient PreventGradient CheckNumerics EnsureShape Print",
    "keeps_buffer": "keeps_value PlaceholderWithDefault reshapes Bitcast",
    # the output is the buffer of the first input where both have as many elements
    "keeps_buffer_of_size": "Slice Tile BroadcastTo Pad PadV2 Sum Mean Max Min Prod",
    "cuts": "Split SplitV Slice StridedSlice",
    "gathers": "Gather GatherV2",
    "concatenates": "Concat ConcatV2",
    # elements of the operands, sizes among them
    "selects": "lengths cuts gathers reshapes ConcatV2 Pack Unpack Identity Cast",
    # a size that passes through them keeps its meaning
    "moves": "measures cuts reshapes ConcatV2 Pack Unpack GatherV2 Identity IdentityN Cast DynamicStitch Enter Merge "
        "Switch Fill EnsureShape Pad PadV2 Transpose",
    # elements of one operand, or of any of them, unchanged: an index stays an index
    "hands_on_elements":
        "Cast@0 Identity@0 Reshape@0 Squeeze@0 ExpandDims@0 Transpose@0 StridedSlice@0 Slice@0 SplitV@0 "
        "Unpack@0 Tile@0 Reverse@0 ReverseV2@0 Unique@0 UniqueV2@0 Gather@0 GatherV2@0 GatherNd@0 "
        "BroadcastTo@0 EnsureShape@0 Snapshot@0 StopGradient@0 PreventGradient@0 Switch@0 Enter@0 Exit@0 "
        "NextIteration@0 PlaceholderWithDefault@0 TensorListFromTensor@0 TensorListGetItem@0 "
        "TensorListStack@0 Split@1",
    "hands_on_any": "Pack ConcatV2 Merge IdentityN SelectV2",
    # they join the results of micro-batches
    "joins": "AddN ConcatV2 Pack",
    # they join the blocks or contributions of the devices of a model axis
    "joins_shards": "AddN ConcatV2 Maximum Minimum",
    "broadcasts": "BroadcastTo Tile",
    # small operands may give a large result
    "enlarges": "broadcasts Fill OneHot Pad PadV2",
    "enlarges_by_value": "enlarges Range Where Bincount",
    # ---- Control flow
    "switches": "Switch RefSwitch",
    "merges": "Merge RefMerge",
    "enters": "Enter RefEnter",
    "exits": "Exit RefExit",
    # they pass a value from one iteration of a loop to the next
    "back_edges": "NextIteration RefNextIteration",
    # the entrance, the exit or a junction of a branch or a loop
    "routes": "switches merges enters exits back_edges",
    # the result is a handle of the same variable as the operand
    "forwards_handle": "routes Identity RefIdentity",
    # they forward a value into a branch or a loop
    "carries": "Identity Enter Switch",
    # routes from one reference to one reference, and those that join several
    "routes_reference": "RefSwitch RefEnter RefIdentity",
    "joins_references": "RefMerge RefExit RefNextIteration",
    "reference_routes": "routes_reference joins_references",
    "conditionals": "If StatelessIf",
    "branches": "conditionals Case StatelessCase",
    "loops": "While StatelessWhile",
    "calls": "PartitionedCall StatefulPartitionedCall",
    "functional": "calls branches loops SymbolicGradient",
    "chooses": "switches branches loops",
    "groups": "NoOp Identity",
    # it decides whether another iteration runs
    "loop_test": "LoopCond",
    # only control edges
    "orders": "NoOp",
    # ---- Variables
    "reference_variables": "Variable VariableV2",
    "variables": "VarHandleOp reference_variables",
    # handles of variables
    "declares": "VarHandleOp",
    "reads_whole": "ReadVariableOp",
    "reads_rows": "ResourceGather ResourceGatherNd",
    # the contents of a variable, or rows of it
    "reads": "ReadVariableOp reads_rows",
    # they read properties of a variable, not its contents
    "inspects": "VariableShape VarIsInitializedOp",
    "assigns": "Assign AssignVariableOp",
    "assigns_dense": "AssignVariableOp AssignAddVariableOp AssignSubVariableOp",
    # they write a block of the variable as they write the whole
    "writes_blocks": r"Assign(Add|Sub|)VariableOp Resource(Sparse)?Apply\w+ "
        r"ResourceScatter(Add|Sub|Mul|Div|Min|Max|Update)",
    "writes_reference": r"Assign(Add|Sub|) "
        r"(Sparse)?Apply(Adam?|Ada\w+|AddSign|CenteredRMSProp|Ftrl\w*|GradientDescent|Momentum) "
        r"(Sparse)?Apply(PowerSign|Proximal\w+|RMSProp) Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update) CountUpTo "
        "StridedSliceAssign",
    "writes": r"writes_blocks writes_reference ResourceCountUpTo ResourceScatter\w+ ResourceStridedSliceAssign",
    # replicas' updates cannot be added up
    "scatters_one_of": "ResourceScatterMin ResourceScatterMax ResourceScatterUpdate",
    # a read whose readers are these may share the variable's buffer
    "shares_buffer": "ReadVariableOp inspects ResourceGather Assign.*VariableOp ResourceApply.*",
    # ---- Containers
    "cell_makers": "TensorArrayV3 StackV2",
    "gradient_cells": "TensorArrayGradV3 TensorArrayGradWithShape",
    "pops": "TensorListPopBack StackPopV2",
    "takes_element": "pops TensorListGetItem TensorArrayReadV3",
    # the operand that is put into a list, or that is made into a whole list
    "puts_element": "TensorListPushBack@1 TensorListSetItem@2 StackPushV2@1 TensorArrayWriteV3@2",
    "fills_list": "TensorListFromTensor@0 TensorArrayScatterV3@2",
    "lists": "puts_element takes_element TensorArrayScatterV3",
    "list_views": "takes_element TensorListPushBack TensorListSetItem",
    "container_writes": "TensorArrayWriteV2 TensorArrayWriteV3 TensorArrayScatterV2 TensorArrayScatterV3 "
        "TensorArraySplitV2 TensorArraySplitV3 StackPush StackPushV2",
    "container_reads": "TensorArrayReadV2 TensorArrayReadV3 TensorArrayGatherV2 TensorArrayGatherV3 "
        "TensorArrayConcatV2 TensorArrayConcatV3 StackPop StackPopV2",
    "container_gradients": "TensorArrayGradV2 TensorArrayGradV3",
    "accumulators": "ConditionalAccumulator ResourceConditionalAccumulator SparseConditionalAccumulator",
    "queues": "FIFOQueueV2 PaddingFIFOQueueV2 PriorityQueueV2 RandomShuffleQueueV2",
    # workers exchange values through them
    "stores": "FIFOQueueV2 ResourceConditionalAccumulator",
    # ---- Input, chance and the process
    "fed": "Placeholder PlaceholderWithDefault",
    "placeholders": "fed PlaceholderV2",
    "given": "placeholders Const NoOp",
    # its value is an attribute
    "constant": "Const",
    "constants": "Const VarHandleOp Placeholder",
    # a list of their results takes no extra memory
    "kept": "constants ReadVariableOp",
    # a constant, or the value of a variable
    "weights": "Const ReadVariableOp",
    "held": "fed Const",
    # their shape is an attribute
    "states_shape": "Placeholder PlaceholderV2 reference_variables",
    # the graph does not record the shape that their printed form has
    "says_shape": "states_shape Const",
    # the next element of an iterator, or a failure where there is none
    "draws_element": "IteratorGetNext IteratorGetNextSync",
    "input_elements": "draws_element MultiDeviceIteratorGetNextFromShard",
    # also the element that a loop over data takes from an Optional
    "elements": "input_elements OptionalGetValue",
    "states_element_shapes": "draws_element OptionalGetValue",
    # the operand with the first of the two seeds
    "dataset_seeds": "ShuffleDataset@2 ShuffleDatasetV3@2 ShuffleAndRepeatDataset@2 ShuffleAndRepeatDatasetV2@2 "
        "RandomDataset@0 RandomDatasetV2@0 SamplingDataset@2",
    "op_seeds": "RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt Multinomial",
    # stateful ops, whose result differs each time that they run
    "draws": r"Random\w* \w*TruncatedNormal(V2)? Multinomial Stateful(Uniform|StandardNormal|Random)\w* "
        r"Rng(ReadAnd)?Skip NonDeterministicInts SampleDistortedBoundingBox(V2)? \w+CandidateSampler "
        r"IteratorGetNext\w* MultiDeviceIteratorGetNext\w* QueueDequeue\w* ReaderRead\w* PyFunc EagerPyFunc",
    "unrepeatable": "NonDeterministicInts PyFunc EagerPyFunc PyFuncStateless Timestamp",
    "waits": "draws_element PyFunc EagerPyFunc QueueDequeueV2",
    "checkpoint_files": "Save SaveSlices SaveV2 Restore RestoreSlice RestoreV2 MergeV2Checkpoints",
    "input_or_output": ".*(Iterator|Dataset|Queue|Reader|Save|Restore|ReadFile|WriteFile|Summary).*",
    # they use files, input, Python code or the console of the process whose program runs
    "of_the_program": "input_or_output .*PyFunc.* Print.*",
    "exchanges": "CollectiveReduceV2 CollectiveGatherV2 CollectiveAllToAllV2",
    # the kernel returns before the exchange is done
    "completes_later": "exchanges CollectiveBcastSendV2 CollectiveBcastRecvV2",
    "sends": "_Send _HostSend",
    "receives": "_Recv _HostRecv",
    # ---- Arithmetic
    "adds": "Add AddV2",
    "terms": "adds Sub AddN",
    "factors": "Mul Div RealDiv",
    # of the first operand, while the others are fixed
    "linear": "copies Neg Sum Transpose broadcasts PreventGradient",
    "linear_in_second": "RsqrtGrad SqrtGrad ReciprocalGrad InvGrad",
    "scales": "copies terms factors BiasAdd Neg Maximum",
    "combines": "Sum Max Min Prod All Any",
    "reduces": "combines Mean",
    "roots": "Sqrt Rsqrt Pow",
    "matmuls": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    "products": "matmuls SparseMatMul Einsum",
    "convolutions": "Conv2D Conv3D DepthwiseConv2dNative",
    # blocks can be padded (EXPLICIT, SAME or VALID) along the split dimension
    "pads_blocks": "Conv2D Conv2DBackpropInput Conv2DBackpropFilter MaxPool MaxPoolGrad DepthwiseConv2dNative "
        "DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter",
    "fused_batch_norms": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    "fused_batch_norm_gradients": "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    "extremes": "ArgMax ArgMin",
    "top": "TopK TopKV2",
    "in_top": "InTopK InTopKV2",
    "unique": "Unique UniqueV2",
    "finds_unique": "unique UniqueWithCounts UniqueWithCountsV2",
    # the operand that holds row numbers, and the operands that are sizes
    "indexed_by": "Gather@1 GatherV2@1 GatherNd@1 UnsortedSegmentSum@1 ScatterNd@0",
    "adds_rows": "UnsortedSegmentSum ScatterNd",
    "given_size": "Range@1 UnsortedSegmentSum@2 ScatterNd@2",
    "table_lookups": "LookupTableFind LookupTableFindV2",
    "crosses": "SparseCross SparseCrossV2 SparseCrossHashed",
    # they treat each text by itself, if the other operands are single constants
    "each_text": "table_lookups Identity Equal NotEqual SelectV2 Cast AddV2 StringLower StringUpper StringStrip "
        "StringLength StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace AsString",
    # operands that hold one parameter for each element drawn
    "random_parameters": "StatelessRandomGammaV2@2 StatelessRandomGammaV3@4 StatelessRandomPoisson@2 "
        "StatelessRandomBinomial@2,3",
    # ---- Kernels (TensorFlow 2.21, CPU; effects of empty blocks were found by running every op on recycled memory)
    # several operations for each element
    "transcendental": "Exp Expm1 Log Log1p Tanh TanhGrad Sigmoid SigmoidGrad Erf Erfc Erfinv Pow Sqrt Rsqrt SqrtGrad "
        "RsqrtGrad Sin Cos Softplus SoftplusGrad Softsign Elu EluGrad Selu SeluGrad Softmax LogSoftmax "
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits ResourceApplyAdam ResourceApplyRMSProp "
        "ResourceApplyFtrl ResourceApplyAdagradV2 ResourceApplyAdagrad",
    # they cost only the start of an op; an assignment takes over the buffer of its value
    "free": "views sizes inspects constants NoOp AssignVariableOp ControlTrigger",
    # the result reuses the memory of an input that has no other reader
    "reuses_input": "AddN BiasAdd Relu ReluGrad Softmax LogSoftmax CollectiveReduceV2 SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits",
    # for an empty block the contribution is zero, but the kernel leaves it undefined
    "undefined_when_empty": "BlockLSTMGrad BlockLSTMGradV2 DepthwiseConv2dNativeBackpropFilter",
    # for any type: an empty block gets a row, which is removed from the outputs
    "refuses_empty": "MirrorPad MirrorPadGrad",
    # oneDNN's kernels give an empty block a wrong shape, or abort the process
    "needs_a_row": "convolutions MaxPool MaxPoolGrad MaxPool3D MaxPool3DGrad LRN LRNGrad",
}
# fmt: on


def _words(trait: str) -> Iterator[str]:
    """Yield the words of a trait, including those of the traits that it names."""
    if trait not in _TRAITS:
        raise LookupError(f"no trait of ops is called '{trait}'")
    for word in _TRAITS[trait].split():
        if word.islower():
            yield from _words(word)
        else:
            yield word


@cache
def _parts(trait: str) -> tuple[dict[str, tuple[int, ...]], re.Pattern[str]]:
    """Return the ops of a trait, each with the operands that it refers to, and a pattern for further ops."""
    names, patterns = {}, []
    for word in _words(trait):
        name, _, at = word.partition("@")
        if re.fullmatch(r"\w+", name):
            names[name] = tuple(map(int, at.split(","))) if at else ()
        else:
            patterns.append(word)
    return names, re.compile("|".join(patterns) or "(?!)")


@cache
def has(op: str, *either: str) -> bool:
    """Return whether an op has a trait, or one of several."""
    return any(op in names or pattern.fullmatch(op) is not None for names, pattern in map(_parts, either))


@cache
def ops_with(trait: str) -> frozenset[str]:
    """Return the ops that a trait names; ops that match its regular expressions are not included."""
    return frozenset(_parts(trait)[0])


def operands(op: str, trait: str) -> tuple[int, ...]:
    """Return the positions of the operands that a trait of an op refers to; none where the op lacks the trait."""
    return _parts(trait)[0].get(op, ())


def traits() -> tuple[str, ...]:
    """Return the names of all traits."""
    return tuple(_TRAITS)


REDUCED_BY = {"max": "Max", "min": "Min", "prod": "Prod", "all": "Min", "any": "Max"}
"""The op that reduces a stack of contributions, by reduction; booleans are stacked as numbers."""
COMBINED_BY = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "all": "LogicalAnd", "any": "LogicalOr"}
"""The op that combines two contributions, by reduction."""

# Every traversal of a graph needs these; a look-up in a set takes a third of the time of `has`.
SWITCHES, MERGES, ENTERS, EXITS = ops_with("switches"), ops_with("merges"), ops_with("enters"), ops_with("exits")
BACK_EDGES, READS = ops_with("back_edges"), ops_with("reads")
