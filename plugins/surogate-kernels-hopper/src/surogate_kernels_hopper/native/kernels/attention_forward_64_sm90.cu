#include "attention_forward_sm90.cuh"

SUROGATE_FORWARD(attention_forward_extended, 64, true, false)
