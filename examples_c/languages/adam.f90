! One step of Adam from Fortran, and the text of a failed call:
!     gfortran adam.f90 -lspillway -o adam && ./adam
module spillway
    use, intrinsic :: iso_c_binding
    implicit none
    integer(c_int32_t), parameter :: abi_version = 2, f32 = 1

    type, bind(c) :: spw_adam_options
        integer(c_int32_t) :: struct_size, weight_decay_mode
        integer(c_int64_t) :: step
        real(c_double) :: lr, beta1, beta2, eps, weight_decay, grad_scale
        integer(c_int32_t) :: no_bias_correction, reserved, rounding, reserved2
        integer(c_int64_t) :: rounding_seed, rounding_first
    end type

    type, bind(c) :: spw_tensor
        integer(c_int32_t) :: struct_size, param_dtype, state_dtype, grad_dtype, copy_dtype, take_copy
        integer(c_int64_t) :: n
        type(c_ptr) :: param, grad, exp_avg, exp_avg_sq, param_copy, options
        type(c_ptr) :: shadow_param, shadow_exp_avg, shadow_exp_avg_sq, param_low, low_sums
    end type

    interface
        integer(c_int32_t) function spw_abi_version() bind(c)
            import :: c_int32_t
        end function

        integer(c_int32_t) function spw_struct_init(name, struct_out, size) bind(c)
            import :: c_int32_t, c_int64_t, c_char, c_ptr
            character(c_char), intent(in) :: name(*)
            type(c_ptr), value :: struct_out
            integer(c_int64_t), value :: size
        end function

        integer(c_int32_t) function spw_adam_step(options, tensors, count, stats_out) bind(c)
            import :: c_int32_t, c_int64_t, c_ptr, spw_adam_options, spw_tensor
            type(spw_adam_options), intent(in) :: options
            type(spw_tensor), intent(in) :: tensors(*)
            integer(c_int64_t), value :: count
            type(c_ptr), value :: stats_out
        end function

        ! `error` 0 is the last failed call of this thread.
        integer(c_int32_t) function spw_error_text(error, text_out, size, needed_out) bind(c)
            import :: c_int32_t, c_int64_t, c_char, c_ptr
            integer(c_int32_t), value :: error
            character(c_char), intent(out) :: text_out(*)
            integer(c_int64_t), value :: size
            type(c_ptr), value :: needed_out
        end function
    end interface

contains

    function last_error() result(text)
        character(:), allocatable :: text
        character(c_char) :: bytes(1000)
        integer :: i
        bytes = c_null_char
        if (spw_error_text(0, bytes, size(bytes, kind=c_int64_t), c_null_ptr) /= 0) error stop "no message"
        text = ""
        do i = 1, size(bytes)
            if (bytes(i) == c_null_char) exit
            text = text // bytes(i)
        end do
    end function

    subroutine check(status)
        integer(c_int32_t), intent(in) :: status
        if (status /= 0) error stop last_error()
    end subroutine
end module

program adam
    use spillway
    implicit none
    real(c_float), target :: param(8), grad(8), exp_avg(8), exp_avg_sq(8)
    type(spw_adam_options), target :: options
    type(spw_tensor), target :: tensors(1)

    if (spw_abi_version() /= abi_version) error stop "another ABI"
    call check(spw_struct_init("spw_adam_options" // c_null_char, c_loc(options), c_sizeof(options)))
    call check(spw_struct_init("spw_tensor" // c_null_char, c_loc(tensors), c_sizeof(tensors(1))))
    param = 1; grad = 0.5; exp_avg = 0; exp_avg_sq = 0
    options%lr = 0.1d0
    tensors(1)%n = size(param)
    tensors(1)%param_dtype = f32; tensors(1)%state_dtype = f32; tensors(1)%grad_dtype = f32
    tensors(1)%param = c_loc(param); tensors(1)%grad = c_loc(grad)
    tensors(1)%exp_avg = c_loc(exp_avg); tensors(1)%exp_avg_sq = c_loc(exp_avg_sq)
    call check(spw_adam_step(options, tensors, 1_c_int64_t, c_null_ptr))
    if (any(abs(param - 0.9) > 1e-6)) error stop "another value"

    options%grad_scale = 0
    if (spw_adam_step(options, tensors, 1_c_int64_t, c_null_ptr) == 0) error stop "nothing was refused"
    print "(f6.4)", param(1)
    print "(a)", last_error()
end program
