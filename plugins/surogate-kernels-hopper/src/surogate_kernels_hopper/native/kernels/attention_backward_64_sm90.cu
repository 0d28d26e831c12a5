#include "attention_backward_sm90.cuh"

SUROGATE_BACKWARD(attention_queries, backward_queries, 64, false, false)
SUROGATE_BACKWARD(attention_queries_extended, backward_queries, 64, true, false)
SUROGATE_BACKWARD(attention_keys, backward_keys, 64, false, true)
SUROGATE_BACKWARD(attention_keys_extended, backward_keys, 64, true, false)
SUROGATE_BACKWARD_SINKS(attention_sinks)
