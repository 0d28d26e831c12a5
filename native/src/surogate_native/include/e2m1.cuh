// E2M1, the 4-bit float (OCP microscaling formats, version 1.0).
#pragma once

namespace surogate {

// The values of E2M1's codes.
__constant__ const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace surogate
