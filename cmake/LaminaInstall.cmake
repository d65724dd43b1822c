# SPDX-License-Identifier: Apache-2.0
# Contents of the wheel besides the Python files: the engine, its plug-ins and the extension in the package's folder, the
# command among the scripts. The engine is found beside the extension, torch beside the package or where it was built.
if(LAMINA_TORCH)
  set(libraries lamina lamina_ucx _lamina)
  set_target_properties(${libraries} PROPERTIES
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;${LIBTORCH_ROOT}/lib")
  install(TARGETS ${libraries} LIBRARY DESTINATION lamina COMPONENT python)
endif()

set(scripts bin)
if(SKBUILD)
  set(scripts ${SKBUILD_SCRIPTS_DIR})
endif()
install(TARGETS lamina_command RUNTIME DESTINATION ${scripts} COMPONENT python)

# Files that a C++ program needs: `cmake --install build/release --component cpp --prefix WHERE`, then find_package(lamina).
if(LAMINA_TORCH)
  include(CMakePackageConfigHelpers)
  install(TARGETS lamina lamina_ucx LIBRARY DESTINATION lib COMPONENT cpp)
  install(TARGETS lamina_command RUNTIME DESTINATION bin COMPONENT cpp)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/lamina/ DESTINATION include/lamina COMPONENT cpp
    FILES_MATCHING PATTERN "*.h" PATTERN gloo_names EXCLUDE PATTERN launch EXCLUDE PATTERN ucx EXCLUDE)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/laminaConfig.cmake.in ${PROJECT_BINARY_DIR}/laminaConfig.cmake @ONLY)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/laminaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/laminaConfig.cmake ${PROJECT_BINARY_DIR}/laminaConfigVersion.cmake
                ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake
    DESTINATION lib/cmake/lamina COMPONENT cpp)
endif()
