# SPDX-License-Identifier: Apache-2.0
# The vocabulary of the folders' CMakeLists.txt: lamina_folder, lamina_embed, lamina_test, lamina_frontend_program,
# lamina_ranks_test, lamina_python_module.

# Fields left out of a designated initializer have their defaults: that is what they are for.
set(LAMINA_WARNINGS -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)

# [Note: precompiled headers] What nearly every file that knows torch includes (2.7 s from ATen/core/Tensor.h alone) is
# compiled once for all folders and once, with GoogleTest, for all tests. A file still includes what it uses.
function(lamina_precompile name)
  cmake_parse_arguments(arg "" "" "HEADERS;LIBS" ${ARGN})
  set(source ${PROJECT_BINARY_DIR}/CMakeFiles/${name}.cc)
  if(NOT EXISTS ${source})
    file(WRITE ${source} "// Carries the precompiled header.\n")
  endif()
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${source})
  target_compile_options(${name} PRIVATE ${LAMINA_WARNINGS})
  target_link_libraries(${name} PRIVATE Libtorch::Libtorch Threads::Threads ${arg_LIBS})
  target_precompile_headers(${name} PRIVATE
    <ATen/core/Tensor.h> <chrono> <condition_variable> <deque> <functional> <map> <memory> <mutex> <optional>
    <sstream> <string> <string_view> <thread> <unordered_map> <utility> <variant> <vector> ${arg_HEADERS})
endfunction()
if(LAMINA_TORCH)
  lamina_precompile(lamina_pch)
  if(LAMINA_TESTS)
    lamina_precompile(lamina_test_pch HEADERS <gtest/gtest.h> LIBS GTest::gmock)
    # Headers that a C++ user's program includes take half a minute.
    lamina_precompile(lamina_frontend_pch HEADERS <torch/torch.h>)
  endif()
endif()

# [Note: batches] Most of the time that a file takes to compile goes into reading headers. So some files of a folder are
# compiled as one, which makes a build from nothing a third shorter; names in their unnamed namespaces differ.
# `-DLAMINA_BATCH=OFF` compiles each alone: this is quicker while one small file is edited again and again.
option(LAMINA_BATCH "Compile some files of a folder as one" ON)
function(lamina_batch target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${LAMINA_BATCH} UNITY_BUILD_BATCH_SIZE 4)
endfunction()

# One target per folder of the engine. `lamina_folder(value TORCH SOURCES a.cc DEPS base)` makes the object library
# `lamina_value` (an interface library when there are no SOURCES), whose include root is the repository; DEPS are
# folders, LIBS are other targets.
function(lamina_folder name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;DEPS;LIBS" ${ARGN})
  set(target lamina_${name})
  if(NOT arg_SOURCES)
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} INTERFACE ${arg_LIBS} $<$<BOOL:${arg_TORCH}>:Libtorch::Libtorch>)
    return()
  endif()
  add_library(${target} OBJECT ${arg_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE ${LAMINA_WARNINGS})
  lamina_batch(${target})
  target_link_libraries(${target} PUBLIC Threads::Threads ${arg_LIBS})
  foreach(dep IN LISTS arg_DEPS)
    target_include_directories(${target} PUBLIC $<TARGET_PROPERTY:lamina_${dep},INTERFACE_INCLUDE_DIRECTORIES>)
  endforeach()
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC Libtorch::Libtorch)
    target_precompile_headers(${target} REUSE_FROM lamina_pch)
  endif()
endfunction()

# `lamina_embed(sources kPreload ranks/preload.py)` adds to the list `sources` a file that makes the text of another the
# constant `lamina::embedded::kPreload`, so that it travels with the program.
function(lamina_embed sources name file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/embedded.cc.in ${name}.cc @ONLY)
  set(${sources} ${${sources}} ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc PARENT_SCOPE)
endfunction()

# [Note: tests] No test is part of `all`, which is what the package needs: `tests` builds all of them, `unit_tests` those
# of the folders without torch. Each has one label, for `ctest -L`: unit (one process, no torch), engine (the engine in
# one process), multiprocess (starts ranks) or installed (what a user gets).
if(LAMINA_TESTS)
  add_custom_target(unit_tests)
  add_custom_target(tests DEPENDS unit_tests)
endif()

# `lamina_test(value_test SOURCES a_test.cc LIBS lamina)` makes one GoogleTest program and registers it. LIBS is the
# engine (`lamina`), or the folders themselves for those without torch. MULTIPROCESS labels one that starts ranks.
function(lamina_test name)
  cmake_parse_arguments(arg "MULTIPROCESS" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE ${LAMINA_WARNINGS})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest_main Threads::Threads)
  set(label unit)
  set(all unit_tests)
  if("lamina" IN_LIST arg_LIBS)
    set(label engine)
    set(all tests)
    # A program is compiled -fPIE, which a header precompiled -fPIC does not fit.
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM lamina_test_pch)
  endif()
  if(arg_MULTIPROCESS)
    set(label multiprocess)
  endif()
  add_dependencies(${all} ${name})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT 300 ENVIRONMENT "OMP_NUM_THREADS=1;GTEST_COLOR=no")
endfunction()

# `lamina_frontend_program(train_gpt SOURCES train_gpt.cc)` makes a program that uses the C++ face, as a user's would.
# UNBUILT: one that is not to compile.
function(lamina_frontend_program name)
  cmake_parse_arguments(arg "UNBUILT" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE ${LAMINA_WARNINGS} -fPIC)
  target_link_libraries(${name} PRIVATE lamina ${arg_LIBS} Threads::Threads)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_precompile_headers(${name} REUSE_FROM lamina_frontend_pch)
  add_dependencies(${name} lamina_ucx)
  if(NOT arg_UNBUILT)
    add_dependencies(tests ${name})
  endif()
endfunction()

# `lamina_ranks_test(over_two 2 train_gpt 30)` runs such a program with these arguments over two processes.
function(lamina_ranks_test name ranks program)
  add_test(NAME ${name} COMMAND lamina_command run -n ${ranks} -c $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS multiprocess TIMEOUT 300 ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

# `lamina_python_module(_lamina SOURCES module.cc LIBS lamina)` makes the extension module of the Python face with the
# pybind11 that torch bundles, whose header (16 s to compile) is precompiled for its files.
function(lamina_python_module name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  Python3_add_library(${name} MODULE WITH_SOABI ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE ${LAMINA_WARNINGS})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} Libtorch::Python)
  target_precompile_headers(${name} PRIVATE <torch/csrc/utils/pybind.h>)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  lamina_batch(${name})
endfunction()
