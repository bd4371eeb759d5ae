"""Ops with side effects, or on a unique resource: they run once per job, on replicated values.

They are input (iterators, readers), tables, queues, files, printing, assertions, Python calls and the clock.
"""

from __future__ import annotations

from autograph_rewrite.ops.rules.factors import lines

RULES = lines("""
# input
once : Iterator IteratorV2 OneShotIterator AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3 MakeIterator
    IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional DeleteIterator IteratorToStringHandle
    IteratorFromStringHandle IteratorFromStringHandleV2 AnonymousMultiDeviceIterator AnonymousMultiDeviceIteratorV3
    MultiDeviceIterator MultiDeviceIteratorInit MultiDeviceIteratorGetNextFromShard DeleteMultiDeviceIterator
    OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone TensorDataset TensorSliceDataset RangeDataset
    BatchDataset BatchDatasetV2 WindowDataset PaddedBatchDatasetV2 MapDataset ParallelMapDatasetV2 FilterDataset
    FlatMapDataset InterleaveDataset ParallelInterleaveDatasetV4 RepeatDataset ShuffleDatasetV2 ShuffleDatasetV3
    ShuffleAndRepeatDatasetV2 TakeDataset SkipDataset ZipDataset PrefetchDataset CacheDataset CacheDatasetV2
    ConcatenateDataset GeneratorDataset OptionsDataset ModelDataset MapAndBatchDataset ShardDataset TFRecordDataset
    TextLineDataset FixedLengthRecordDatasetV2 FinalizeDataset DatasetCardinality ReduceDataset DatasetToSingleElement
    ReaderReadV2 ReaderReadUpToV2 ReaderNumRecordsProducedV2 ReaderNumWorkUnitsCompletedV2 ReaderResetV2
    TFRecordReaderV2 TextLineReaderV2 WholeFileReaderV2 FixedLengthRecordReaderV2 IdentityReaderV2
# tables
once : HashTable HashTableV2 MutableHashTable MutableHashTableV2 AnonymousHashTable AnonymousMutableHashTable
    MutableDenseHashTableV2 InitializeTable InitializeTableV2 InitializeTableFromTextFile InitializeTableFromTextFileV2
    LookupTableInsertV2 LookupTableRemoveV2 LookupTableSizeV2 LookupTableExportV2 LookupTableImportV2
# queues, barriers, staging areas, accumulators
once : FIFOQueueV2 PaddingFIFOQueueV2 PriorityQueueV2 RandomShuffleQueueV2 QueueEnqueueV2 QueueEnqueueManyV2
    QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 QueueCloseV2 QueueSizeV2 QueueIsClosedV2 Barrier
    BarrierInsertMany BarrierTakeMany BarrierClose BarrierReadySize BarrierIncompleteSize Stage Unstage StagePeek
    StageSize StageClear ConditionalAccumulator AccumulatorApplyGradient AccumulatorTakeGradient
    AccumulatorSetGlobalStep AccumulatorNumAccumulated SparseConditionalAccumulator SparseAccumulatorApplyGradient
    SparseAccumulatorTakeGradient ResourceConditionalAccumulator ResourceAccumulatorApplyGradient
    ResourceAccumulatorTakeGradient ResourceAccumulatorSetGlobalStep ResourceAccumulatorNumAccumulated
# files and summaries
once : ReadFile WriteFile MatchingFiles Save SaveSlices SaveV2 Restore RestoreSlice RestoreV2 MergeV2Checkpoints
    ShardedFilename ShardedFilespec ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2
    TensorSummary TensorSummaryV2 MergeSummary SummaryWriter CreateSummaryFileWriter CreateSummaryDbWriter
    FlushSummaryWriter CloseSummaryWriter WriteSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary
    WriteAudioSummary WriteGraphSummary WriteRawProtoSummary ImportEvent
once : Print PrintV2 Assert Abort PyFunc PyFuncStateless EagerPyFunc Timestamp
whole : NoOp ControlTrigger Placeholder PlaceholderV2 PlaceholderWithDefault
""")
