//! Kernels can be selected by name.

use spillway_kernels::Kernel;

#[test]
fn names_are_found_and_others_are_refused_with_the_list() {
    assert_eq!(Kernel::named("scalar").unwrap().name(), "scalar");
    let message = Kernel::named("sse9").unwrap_err().to_string();
    assert!(
        message.contains("sse9") && message.contains("avx512, avx2, sve_bf16, sve, neon, scalar"),
        "{message}"
    );
}

#[test]
fn the_list_ends_with_scalar_and_every_entry_can_be_named() {
    let all: Vec<Kernel> = Kernel::all().collect();
    assert_eq!(all.last().map(|kernel| kernel.name()), Some("scalar"));
    for kernel in all {
        assert_eq!(Kernel::named(kernel.name()), Ok(kernel));
    }
}
