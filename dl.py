import time,sys,ctypes,os
from importlib.util import find_spec
t=time.perf_counter()
d=os.path.join(os.path.dirname(find_spec("torch").origin),"lib")
print("spec",time.perf_counter()-t); t=time.perf_counter()
if sys.argv[1]=="1":
    for n in ("libtorch_global_deps.so",):
        ctypes.CDLL(os.path.join(d,n),mode=ctypes.RTLD_GLOBAL)
    print("deps",time.perf_counter()-t); t=time.perf_counter()
    for n in ("libtorch_python.so",):
        ctypes.CDLL(os.path.join(d,n))
    print("dl",time.perf_counter()-t); t=time.perf_counter()
import torch
print("torch",time.perf_counter()-t)
