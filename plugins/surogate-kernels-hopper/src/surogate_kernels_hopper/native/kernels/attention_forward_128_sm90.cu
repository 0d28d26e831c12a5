#include "attention_forward_sm90.cuh"

SUROGATE_FORWARD(attention_forward, 128, false, false)
SUROGATE_FORWARD(attention_forward_extended, 128, true, false)
