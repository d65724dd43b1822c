# SPDX-License-Identifier: Apache-2.0
# Finds the libtorch inside the Python package `torch` by its files alone, so that the CUDA wheel serves on a machine
# without a CUDA toolkit, which its own CMake config would demand. Imports nothing: torch takes seconds to import.
#
#   Libtorch::Libtorch   include folders, c10, torch_cpu, torch
#   Libtorch::Python     the above, torch_python, the pybind11 that torch bundles, Python's headers
#   LIBTORCH_ROOT        the folder of the package
#   LIBTORCH_MINOR       the part of its version within which binaries fit: 2.13
#
# find_package(Libtorch 2.11...2.15) says which minor versions will do.
set(wanted "torch ${Libtorch_FIND_VERSION_MIN} to ${Libtorch_FIND_VERSION_MAX}")
if(Libtorch_FIND_VERSION_MIN STREQUAL Libtorch_FIND_VERSION_MAX)
  set(wanted "torch ${Libtorch_FIND_VERSION_MIN}")
endif()

# Ends the configuration with one line (a leading space keeps CMake from wrapping it).
function(libtorch_stop text)
  message(FATAL_ERROR " ${text}")
endfunction()

find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
if(NOT Python3_Development.Module_FOUND)
  libtorch_stop("${Python3_EXECUTABLE} has no Python.h, which lamina's extension needs (Debian: python3-dev).")
endif()
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c
          "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE LIBTORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT LIBTORCH_ROOT)
  libtorch_stop("lamina is compiled for the torch that it will run with, and ${Python3_EXECUTABLE} has none: install ${wanted} there.")
endif()

set(version "")
if(EXISTS ${LIBTORCH_ROOT}/version.py)
  file(STRINGS ${LIBTORCH_ROOT}/version.py version REGEX "^__version__" LIMIT_COUNT 1)
  string(REGEX REPLACE "^[^'\"]*['\"]([^'\"]*)['\"].*$" "\\1" version "${version}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" LIBTORCH_MINOR "${version}")
if(NOT LIBTORCH_MINOR OR LIBTORCH_MINOR VERSION_LESS Libtorch_FIND_VERSION_MIN
   OR LIBTORCH_MINOR VERSION_GREATER Libtorch_FIND_VERSION_MAX)
  libtorch_stop("lamina needs ${wanted}, and ${LIBTORCH_ROOT} holds '${version}': install another torch there.")
endif()

foreach(file lib/libc10.so lib/libtorch_cpu.so lib/libtorch.so lib/libtorch_python.so
             include/ATen/core/Tensor.h include/pybind11/detail/internals.h)
  if(NOT EXISTS ${LIBTORCH_ROOT}/${file})
    libtorch_stop("torch ${version} in ${LIBTORCH_ROOT} has no ${file}: lamina needs the package as PyTorch publishes it for pip.")
  endif()
endforeach()

# [Note: pybind11 internals] Modules share pybind11 types only if they name their shared state alike. The name holds
# pybind11's internals version and the C++ ABI; what torch was built with stands as text in libtorch_python.so. Were
# ours another, every tensor or process group that crosses would be refused at run time.
set(names "__pybind11_internals_v([0-9]+)_.*use_cxx11_abi_([01])__")
if(NOT LIBTORCH_INTERNALS_ROOT STREQUAL LIBTORCH_ROOT OR NOT LIBTORCH_INTERNALS_VERSION STREQUAL version)
  file(STRINGS ${LIBTORCH_ROOT}/lib/libtorch_python.so internals REGEX ${names} LIMIT_COUNT 1)
  set(LIBTORCH_INTERNALS "${internals}" CACHE INTERNAL "The pybind11 state torch_python was built with")
  set(LIBTORCH_INTERNALS_ROOT ${LIBTORCH_ROOT} CACHE INTERNAL "Where LIBTORCH_INTERNALS was read")
  set(LIBTORCH_INTERNALS_VERSION ${version} CACHE INTERNAL "The torch LIBTORCH_INTERNALS was read from")
endif()
string(REGEX MATCH "${names}" found "${LIBTORCH_INTERNALS}")
set(torch_internals "${CMAKE_MATCH_1}")
set(torch_abi "${CMAKE_MATCH_2}")

file(STRINGS ${LIBTORCH_ROOT}/include/pybind11/detail/internals.h header_internals
     REGEX "define[ ]+PYBIND11_INTERNALS_VERSION[ ]+[0-9]+" LIMIT_COUNT 1)
string(REGEX REPLACE ".*PYBIND11_INTERNALS_VERSION[ ]+([0-9]+).*" "\\1" header_internals "${header_internals}")
if(NOT "${header_internals}" STREQUAL "${torch_internals}")
  libtorch_stop("torch ${version} was built with pybind11 internals v${torch_internals}, and the headers in ${LIBTORCH_ROOT}/include/pybind11 are v${header_internals}: install torch==${version} again.")
endif()

file(WRITE ${CMAKE_BINARY_DIR}/CMakeFiles/libtorch_abi.cc "#include <string>\nlamina_abi _GLIBCXX_USE_CXX11_ABI\n")
separate_arguments(flags NATIVE_COMMAND "${CMAKE_CXX_FLAGS}")
execute_process(
  COMMAND ${CMAKE_CXX_COMPILER} ${flags} -E -P ${CMAKE_BINARY_DIR}/CMakeFiles/libtorch_abi.cc
  OUTPUT_VARIABLE preprocessed COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "lamina_abi ([A-Za-z0-9_]+)" found "${preprocessed}")
if(NOT "${CMAKE_MATCH_1}" STREQUAL "${torch_abi}")
  libtorch_stop("torch ${version} was built with _GLIBCXX_USE_CXX11_ABI=${torch_abi}, and ${CMAKE_CXX_COMPILER} compiles with ${CMAKE_MATCH_1}: use g++ with libstdc++ and no such flag of your own.")
endif()

add_library(Libtorch::Libtorch INTERFACE IMPORTED)
target_include_directories(Libtorch::Libtorch SYSTEM INTERFACE
  ${LIBTORCH_ROOT}/include ${LIBTORCH_ROOT}/include/torch/csrc/api/include)
# Definitions of torch's own config for its distributed headers; {fmt} comes with torch as headers only.
target_compile_definitions(Libtorch::Libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO FMT_HEADER_ONLY=1)
# A program needs all three, used or not, and knows where they are. So they are loaded before they are sought for lamina's
# library, which does not know. The third has no symbols: it is there to load the CUDA half, when torch has one, into a
# program without Python. What torch's libraries need is found from where they lie, at run time only.
set(lib ${LIBTORCH_ROOT}/lib)
target_link_libraries(Libtorch::Libtorch INTERFACE
  "-Wl,--push-state,--no-as-needed,${lib}/libc10.so,${lib}/libtorch_cpu.so,${lib}/libtorch.so,--pop-state"
  ${lib}/libc10.so ${lib}/libtorch_cpu.so -Wl,--allow-shlib-undefined)
add_library(Libtorch::Python INTERFACE IMPORTED)
target_link_libraries(Libtorch::Python INTERFACE
  ${LIBTORCH_ROOT}/lib/libtorch_python.so Libtorch::Libtorch Python3::Module)

set(Libtorch_FOUND TRUE)
message(STATUS "Found torch ${version}: ${LIBTORCH_ROOT}")
