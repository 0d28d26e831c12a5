#include "attention_forward_sm90.cuh"

SUROGATE_FORWARD(attention_forward, 256, false, true)
SUROGATE_FORWARD(attention_forward_extended, 256, true, false)
