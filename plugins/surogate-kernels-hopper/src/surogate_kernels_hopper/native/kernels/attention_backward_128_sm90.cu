#include "attention_backward_sm90.cuh"

SUROGATE_BACKWARD(attention_queries, backward_queries, 128, false, true)
SUROGATE_BACKWARD(attention_queries_extended, backward_queries, 128, true, true)
SUROGATE_BACKWARD(attention_keys, backward_keys, 128, false, true)
SUROGATE_BACKWARD(attention_keys_extended, backward_keys, 128, true, true)
SUROGATE_BACKWARD_SINKS(attention_sinks)
