# SPDX-License-Identifier: Apache-2.0
# Finds the libtorch of the Python package `torch`: target Libtorch::Libtorch (c10, torch_cpu, torch) and
# Libtorch::Python (torch_python, pybind11 as torch bundles it).
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python3_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE LIBTORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
add_library(Libtorch::Libtorch INTERFACE IMPORTED)
target_include_directories(Libtorch::Libtorch SYSTEM INTERFACE ${LIBTORCH_ROOT}/include ${LIBTORCH_ROOT}/include/torch/csrc/api/include)
target_link_libraries(Libtorch::Libtorch INTERFACE ${LIBTORCH_ROOT}/lib/libc10.so ${LIBTORCH_ROOT}/lib/libtorch_cpu.so ${LIBTORCH_ROOT}/lib/libtorch.so)
add_library(Libtorch::Python INTERFACE IMPORTED)
target_link_libraries(Libtorch::Python INTERFACE Libtorch::Libtorch Python3::Module ${LIBTORCH_ROOT}/lib/libtorch_python.so)
set(Libtorch_FOUND TRUE)
