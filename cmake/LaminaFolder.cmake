# SPDX-License-Identifier: Apache-2.0
# One target per folder of the engine. `lamina_folder(value TORCH SOURCES a.cc DEPS base)` makes the object library
# `lamina_value`, whose include root is the repository; DEPS are folders, LIBS are other targets.
function(lamina_folder name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;DEPS;LIBS" ${ARGN})
  set(target lamina_${name})
  add_library(${target} OBJECT ${arg_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter)
  target_link_libraries(${target} PUBLIC Threads::Threads ${arg_LIBS})
  foreach(dep IN LISTS arg_DEPS)
    target_include_directories(${target} PUBLIC $<TARGET_PROPERTY:lamina_${dep},INTERFACE_INCLUDE_DIRECTORIES>)
  endforeach()
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC Libtorch::Libtorch)
    target_precompile_headers(${target} PRIVATE <ATen/core/Tensor.h>)
  endif()
endfunction()

# `lamina_test(value_test SOURCES a_test.cc LIBS lamina)` makes one GoogleTest program and registers its cases.
function(lamina_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gtest_main Threads::Threads)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endfunction()
