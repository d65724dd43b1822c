# SPDX-License-Identifier: Apache-2.0
# How everything is compiled: the language, the cache, the linker, the sanitizers, where results lie.
include(CheckLinkerFlag)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
# Instances of templates, most of them of torch's, are no one else's: a tenth of the library is their names.
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# One folder for all libraries, as in the wheel: the engine finds its plug-ins beside itself.
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_BUILD_RPATH $ORIGIN)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()
# libtorch's headers take a quarter longer at -O3, and our time is spent inside libtorch.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# The python that has torch, and for which the extension is built: the checkout's own, unless told otherwise.
if(NOT DEFINED Python3_EXECUTABLE AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  set(Python3_EXECUTABLE ${PROJECT_SOURCE_DIR}/.venv/bin/python)
endif()

# [Note: compiler cache] A result is found again from another clone of this repository. Paths below the checkout are
# hashed relative to it, the working directory not at all, and headers by content, not by time (they were just
# unpacked). The same three kinds of sloppiness, and -fpch-preprocess, are what precompiled headers need. (CCACHE_DEPEND
# spares a miss a tenth of its time, but then nothing is found from another clone.)
find_program(LAMINA_CCACHE ccache)
if(LAMINA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${LAMINA_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options(-fpch-preprocess)
  endif()
endif()

find_program(LAMINA_MOLD mold)
if(LAMINA_MOLD)
  check_linker_flag(CXX -fuse-ld=mold LAMINA_LINKS_WITH_MOLD)
  if(LAMINA_LINKS_WITH_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

if(LAMINA_SANITIZE)
  # A check of a vptr opens a pipe, and takes its failure for a bad object; tests use up all descriptors.
  add_compile_options(-fsanitize=${LAMINA_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${LAMINA_SANITIZE})
endif()

# [Note: one libstdc++] The engine shares torch's: streams, locales and exceptions belong to the libstdc++ of the process.
# With a second one inside the engine, the first number that is written to a stream ends in signal 11. A linker takes
# the static one where the system has libstdc++.so.6 without the link that development packages bring.
function(lamina_needs_shared_libstdcxx variable)
  set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/libstdcxx)
  file(WRITE ${probe}.cc "#include <ostream>\nvoid write(std::ostream& out) { out << 1ul; }\n")
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS} ${CMAKE_SHARED_LINKER_FLAGS}")
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} ${flags} -fPIC -shared ${probe}.cc -o ${probe}.so ${ARGN}
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(NOT failed)
    file(STRINGS ${probe}.so needed REGEX "libstdc\\+\\+\\.so\\.6|libc\\+\\+\\.so")
  endif()
  if(needed)
    set(${variable} ON PARENT_SCOPE)
  else()
    set(${variable} OFF PARENT_SCOPE)
  endif()
endfunction()

lamina_needs_shared_libstdcxx(is_shared)
if(NOT is_shared)
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6 OUTPUT_VARIABLE libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE)
  lamina_needs_shared_libstdcxx(is_shared ${libstdcxx})
  if(NOT is_shared)
    message(FATAL_ERROR " ${CMAKE_CXX_COMPILER} links the static libstdc++, and the engine has to share torch's: install "
                        "the development files of libstdc++ (Debian: libstdc++-dev of your g++), without -static-libstdc++.")
  endif()
  link_libraries(${libstdcxx})
endif()
