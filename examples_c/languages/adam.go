// One step of Adam from Go, and the texts of failed calls:
//
//	CGO_CFLAGS=-IPREFIX/include CGO_LDFLAGS=-LPREFIX/lib go run adam.go
package main

// #cgo LDFLAGS: -lspillway
// #include <spillway.h>
// #include <stdlib.h>
import "C"

import (
	"errors"
	"fmt"
	"log"
	"math"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

// check returns the error of a call. `err` is errno, which cgo reads on the thread that made the call: the goroutine may
// be on another thread now. A call that succeeds leaves any number there.
func check(status C.spw_status, err error) error {
	if status == C.SPW_OK {
		return nil
	}
	var number syscall.Errno
	errors.As(err, &number)
	text := make([]C.char, 1000)
	if C.spw_error_text(C.int32_t(number), &text[0], C.uint64_t(len(text)), nil) != C.SPW_OK {
		return fmt.Errorf("status %d", status)
	}
	return errors.New(C.GoString(&text[0]))
}

// makes fills a struct with its defaults.
func makes(name string, made unsafe.Pointer, size uintptr) {
	given := C.CString(name)
	defer C.free(unsafe.Pointer(given))
	status, err := C.spw_struct_init(given, made, C.uint64_t(size))
	if err := check(status, err); err != nil {
		log.Fatal(err)
	}
}

func step(options *C.spw_adam_options, tensor *C.spw_tensor) error {
	status, err := C.spw_adam_step(options, tensor, 1, nil)
	return check(status, err)
}

// floats returns memory of C: a struct that C reads must not have pointers to memory of Go.
func floats(n int, value float32) []float32 {
	made := unsafe.Slice((*float32)(C.calloc(C.size_t(n), 4)), n)
	for i := range made {
		made[i] = value
	}
	return made
}

func options() C.spw_adam_options {
	var made C.spw_adam_options
	makes("spw_adam_options", unsafe.Pointer(&made), unsafe.Sizeof(made))
	made.lr = 0.1
	return made
}

func main() {
	if C.spw_abi_version() != C.SPW_ABI_VERSION {
		log.Fatal("another ABI")
	}
	const n = 8
	param, grad, expAvg, expAvgSq := floats(n, 1), floats(n, 0.5), floats(n, 0), floats(n, 0)
	var tensor C.spw_tensor
	makes("spw_tensor", unsafe.Pointer(&tensor), unsafe.Sizeof(tensor))
	tensor.n = n
	tensor.param_dtype, tensor.state_dtype, tensor.grad_dtype = C.SPW_DTYPE_F32, C.SPW_DTYPE_F32, C.SPW_DTYPE_F32
	tensor.param, tensor.grad = unsafe.Pointer(&param[0]), unsafe.Pointer(&grad[0])
	tensor.exp_avg, tensor.exp_avg_sq = unsafe.Pointer(&expAvg[0]), unsafe.Pointer(&expAvgSq[0])
	good := options()
	if err := step(&good, &tensor); err != nil {
		log.Fatal(err)
	}
	for _, value := range param {
		if math.Abs(float64(value)-0.9) > 1e-6 {
			log.Fatal(param)
		}
	}
	fmt.Printf("%.4f\n", param[0])

	bad := options()
	bad.grad_scale = 0
	fmt.Println(step(&bad, &tensor))

	// Goroutines move from thread to thread, and each gets the texts of its own calls: by errno, or on a thread of its own.
	var all sync.WaitGroup
	for number := 2; number < 66; number++ {
		all.Add(1)
		go func(own C.spw_adam_options, wanted string, locked bool) {
			defer all.Done()
			if locked {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
			}
			for call := 0; call < 10; call++ {
				status, err := C.spw_adam_step(&own, &tensor, 1, nil)
				runtime.Gosched()
				text := fmt.Sprint(check(status, err))
				if locked {
					text = C.GoString(C.spw_last_error())
				}
				if !strings.Contains(text, wanted) {
					log.Fatalf("%s, and not %s", text, wanted)
				}
			}
		}(withBeta(number), fmt.Sprintf("options.beta1: %d is not", number), number%2 == 0)
	}
	all.Wait()
}

func withBeta(value int) C.spw_adam_options {
	made := options()
	made.beta1 = C.double(value)
	return made
}
