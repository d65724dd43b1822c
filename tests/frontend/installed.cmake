# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=. -DBUILD=build/dev -DWHERE=folder -P installed.cmake: installs the C++ part of a build, builds the
# example project against it, and runs that over two processes. The page on C++ shows the example as it is.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${output}")
  endif()
endfunction()

file(READ ${SOURCE}/docs/cpp.md page)
file(READ ${SOURCE}/examples/cmake_project/main.cc example)
string(FIND "${page}" "${example}" place)
if(place EQUAL -1)
  message(FATAL_ERROR "docs/cpp.md does not show examples/cmake_project/main.cc as it is")
endif()

file(REMOVE_RECURSE ${WHERE})
run(${CMAKE_COMMAND} --install ${BUILD} --component cpp --prefix ${WHERE}/prefix)
find_program(ccache ccache)
if(ccache)
  set(ENV{CCACHE_SLOPPINESS} include_file_mtime,include_file_ctime)  # the headers were installed just now
  set(launcher -DCMAKE_CXX_COMPILER_LAUNCHER=${ccache})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE}/examples/cmake_project -B ${WHERE}/build -DCMAKE_PREFIX_PATH=${WHERE}/prefix
    -DCMAKE_BUILD_TYPE=Debug ${launcher})
run(${CMAKE_COMMAND} --build ${WHERE}/build)
run(${WHERE}/prefix/bin/lamina run -n 2 -c ${WHERE}/build/train)
file(REMOVE_RECURSE ${WHERE})
