#include "attention_backward_sm90.cuh"

SUROGATE_BACKWARD(attention_queries, backward_queries, 256, false, false)
SUROGATE_BACKWARD(attention_queries_extended, backward_queries, 256, true, false)
SUROGATE_BACKWARD(attention_keys, backward_keys_wide, 256, false)
SUROGATE_BACKWARD(attention_keys_extended, backward_keys_wide, 256, true)
SUROGATE_BACKWARD_SINKS(attention_sinks)
