//! Compiles the programs of `benches/bpf`, with the crate's own headers.

use std::error::Error;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

/// Compiles `benches/bpf/NAME.bpf.c` as the crate's programs are, and says where the object is.
pub fn object(name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.bpf.o"));
    let include = format!("-I{}", root.join("src/bpf").display());
    let mut builder = SkeletonBuilder::new();
    if let Some(clang) = std::env::var_os("CLANG") {
        builder.clang(clang);
    }
    builder
        .source(root.join(format!("benches/bpf/{name}.bpf.c")))
        .obj(&object)
        .clang_args([&*include, "-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"])
        .build()
        .map_err(|error| format!("compiling benches/bpf/{name}.bpf.c: {error:#}"))?;
    Ok(object)
}
