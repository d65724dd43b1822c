# SPDX-License-Identifier: Apache-2.0
# Headers that the system has to have besides torch and Python. One line says all that are missing, with Debian's
# packages.
set(missing "")
macro(lamina_need variable file package)
  find_path(${variable} ${file})
  if(NOT ${variable})
    list(APPEND missing "${file} (Debian: ${package})")
  elseif(NOT ${variable} IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
    include_directories(SYSTEM ${${variable}})
  endif()
endmacro()

lamina_need(CLI11_INCLUDE_DIR CLI/CLI.hpp libcli11-dev)
lamina_need(JSON_INCLUDE_DIR nlohmann/json.hpp nlohmann-json3-dev)
lamina_need(XXHASH_INCLUDE_DIR xxhash.h libxxhash-dev)
lamina_need(YAML_INCLUDE_DIR yaml-cpp/yaml.h libyaml-cpp-dev)
lamina_need(DEFLATE_INCLUDE_DIR libdeflate.h libdeflate-dev)
lamina_need(OPENSSL_INCLUDE_DIR openssl/sha.h libssl-dev)
if(LAMINA_TORCH)
  lamina_need(UCX_INCLUDE_DIR ucp/api/ucp.h libucx-dev)
endif()
if(missing)
  list(JOIN missing ", " missing)
  message(FATAL_ERROR " lamina is compiled here, and this system lacks ${missing}.")
endif()

# The static library of this name where it can become a part of a shared one, so that machines need not have it; else the
# shared one. Debian 13 compiles libdeflate.a without -fPIC.
function(lamina_library variable name)
  find_library(${variable}_STATIC lib${name}.a)
  set(whole -Wl,--whole-archive ${${variable}_STATIC} -Wl,--no-whole-archive)
  set(failed ON)
  if(${variable}_STATIC)
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -shared -o ${PROJECT_BINARY_DIR}/CMakeFiles/${variable}.so ${whole}
      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  endif()
  if(failed)
    find_library(${variable}_SHARED ${name} REQUIRED)
    set(${variable} ${${variable}_SHARED} PARENT_SCOPE)
  else()
    set(${variable} ${${variable}_STATIC} PARENT_SCOPE)
  endif()
endfunction()
