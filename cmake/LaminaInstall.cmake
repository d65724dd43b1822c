# SPDX-License-Identifier: Apache-2.0
# Contents of the wheel besides the Python files: a folder named after the torch it is for, with the engine, its plug-ins
# and the extension; the command among the scripts; headers; a UCX. No path of this machine is left in them: the engine
# is found beside the extension, torch beside the package, or loaded already (by Python, or by a program that links
# Libtorch::Libtorch).
set(scripts bin)
if(SKBUILD)
  set(scripts ${SKBUILD_SCRIPTS_DIR})
endif()
install(TARGETS lamina_command RUNTIME DESTINATION ${scripts} COMPONENT python)
if(NOT LAMINA_TORCH)
  return()
endif()

set(libraries lamina lamina_ucx _lamina)
set_target_properties(${libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
install(TARGETS ${libraries} LIBRARY DESTINATION lamina/torch${LIBTORCH_MINOR} COMPONENT python)

# Files that a C++ program needs to find_package(lamina) with CMAKE_PREFIX_PATH=`prefix`. The engine is in
# `prefix`/`engine`, for `torches`; `python` is the interpreter whose torch is taken, unless the program names one.
include(CMakePackageConfigHelpers)
function(lamina_install_headers component prefix engine torches python)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/lamina/ DESTINATION ${prefix}/include/lamina COMPONENT ${component}
    FILES_MATCHING PATTERN "*.h" PATTERN gloo_names EXCLUDE PATTERN launch EXCLUDE PATTERN ucx EXCLUDE)
  set(config ${PROJECT_BINARY_DIR}/cmake_${component})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/laminaConfig.cmake.in ${config}/laminaConfig.cmake @ONLY)
  write_basic_package_version_file(${config}/laminaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${config}/laminaConfig.cmake ${config}/laminaConfigVersion.cmake
                ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake
    DESTINATION ${prefix}/lib/cmake/lamina COMPONENT ${component})
endfunction()
lamina_install_headers(python lamina "torch\${LIBTORCH_MINOR}" ${LAMINA_TORCHES} "")

# `cmake --install build/release --component cpp --prefix WHERE`
install(TARGETS lamina lamina_ucx LIBRARY DESTINATION lib COMPONENT cpp)
install(TARGETS lamina_command RUNTIME DESTINATION bin COMPONENT cpp)
lamina_install_headers(cpp . lib ${LIBTORCH_MINOR}...${LIBTORCH_MINOR} ${Python3_EXECUTABLE})

# UCX with shared memory and TCP, for machines that have none ([Note: which UCX]), and the licences of it and of what it
# needs, where the distribution is Debian or Ubuntu.
get_filename_component(ucx ${UCX_UCP} REALPATH)
get_filename_component(ucx ${ucx} DIRECTORY)
foreach(name libucm.so.0 libucs.so.0 libuct.so.0 libucp.so.0 libnuma.so.1 ucx/libuct_cma.so.0)
  get_filename_component(file ${ucx}/${name} REALPATH)
  get_filename_component(folder ${name} DIRECTORY)
  get_filename_component(name ${name} NAME)
  install(FILES ${file} DESTINATION lamina/ucx/${folder} RENAME ${name} COMPONENT python OPTIONAL)
endforeach()
foreach(package libucx0 libnuma1)
  install(FILES /usr/share/doc/${package}/copyright DESTINATION lamina/ucx RENAME LICENSE.${package} COMPONENT python OPTIONAL)
endforeach()
